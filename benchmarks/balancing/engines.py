"""The paper's engines by roofline: two A100s, each of which serves Qwen3-30B-A3B and both prefills and decodes."""

from shell_router.engines.simulated import DecodeCosts, PairCosts, PrefillCosts, TransferCosts

# NVIDIA A100 SXM 80 GB data sheet: BF16 without sparsity, HBM2e
FLOPS, BANDWIDTH, MEMORY = 312e12, 2.039e12, 80e9
# Qwen3 technical report (2505.09388), table 2, and the model's config.json: 30.5 billion parameters, 3.3 of them
# active, 48 layers, 32 heads, 4 of them for KV, each of 128 numbers; 128 experts, of which a token takes 8
PARAMETERS, ACTIVE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30.5e9, 3.3e9, 48, 32, 4, 128
EXPERTS, CHOSEN, IN_EXPERTS = 128, 8, 29.0e9
BYTES = 2
# Assumed, as in configs/engines/h200.yaml: what kernels reach of the data sheet, and the memory an engine may fill;
# 2048 tokens of a pass are vLLM's default on an A100
COMPUTE_SHARE, MEMORY_SHARE, USABLE, CHUNK, PASS_S, REQUEST_S = 0.5, 0.7, 0.9, 2048, 0.0005, 0.004
FEW, MANY = 8, 64
VLLM_RESERVES = 0
"""vLLM lets a request in where its prompt fits (v1/core/sched/scheduler.py), and preempts where it then runs out."""


def costs(*, cached: bool, reserved_tokens: int | None = VLLM_RESERVES) -> PairCosts:
    """Of an engine with all weights on its own GPU; with `cached` it keeps prefixes. See DecodeCosts for the other.

    A pass reads every expert that one of its tokens takes. For prefill these are all; a step of n sequences touches
    1 - (1 - 8/128)^n of them, here a straight line through 8 and 64 sequences.
    """
    bandwidth, flops = BANDWIDTH * MEMORY_SHARE, FLOPS * COMPUTE_SHARE
    kv_bytes = 2 * LAYERS * KV_HEADS * HEAD_DIM * BYTES
    room = int((MEMORY * USABLE - PARAMETERS * BYTES) / kv_bytes)
    token_s = 2 * ACTIVE / flops
    few_s, many_s = (step_s(n, bandwidth) for n in (FEW, MANY))
    per_sequence_s = (many_s - few_s) / (MANY - FEW)
    prefill = PrefillCosts(
        PASS_S + PARAMETERS * BYTES / bandwidth,
        token_s,
        4 * HEADS * HEAD_DIM * LAYERS / flops,
        CHUNK,
        cache_tokens=room if cached else 1,
    )
    decode = DecodeCosts(
        PASS_S + few_s - FEW * per_sequence_s,
        token_s + per_sequence_s,
        kv_bytes / bandwidth,
        room,
        reserved_tokens=reserved_tokens,
    )
    return PairCosts(prefill, decode, TransferCosts(REQUEST_S))


def step_s(sequences: int, bandwidth: float) -> float:
    """Seconds in which the weights that so many sequences touch are read."""
    touched = 1 - (1 - CHOSEN / EXPERTS) ** sequences
    return (PARAMETERS - IN_EXPERTS + touched * IN_EXPERTS) * BYTES / bandwidth
