"""Clients of engine servers: fleets, prefill-decode pairs, tokenizers, the embedder, metrics."""
