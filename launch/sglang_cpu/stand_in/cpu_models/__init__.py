"""Models that SGLang serves in place of its own where SGLANG_EXTERNAL_MODEL_PACKAGE is
`cpu_models`.
"""
