"""An SGLang plugin for engines without a GPU: prefill attends from new tokens alone.

SGLang's `torch_native` backend attends from every token of a prompt in each prefill and drops what it has for cached
tokens, so an update of 32 tokens costs as much attention as the whole prompt. Kernels of GPUs do not do that. The
results are the same but for rounding. Only where the variable SHELL_ROUTER_CPU_ATTENTION is `new-tokens`.
"""

import os
from collections.abc import Callable
from typing import Any

VARIABLE = "SHELL_ROUTER_CPU_ATTENTION"
EXTEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"


def register() -> None:
    """What SGLang calls in each of its processes."""
    if os.environ.get(VARIABLE) == "new-tokens":
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - only SGLang has it

        HookRegistry.register(EXTEND, attend_from_new_tokens, HookType.AROUND)


def attend_from_new_tokens(
    extend: Callable[..., Any],
    backend: Any,
    query: Any,
    output: Any,
    keys: Any,
    values: Any,
    token_slots: Any,
    requests: Any,
    lengths: Any,
    prefix_lengths: Any,
    new_lengths: Any,
    encoder_lengths: Any = None,
    **named: Any,
) -> Any:
    """Around `_run_sdpa_forward_extend`: fills `output` [new tokens, heads, head size] and returns it."""
    if encoder_lengths is not None or not named["causal"] or named["sliding_window_size"] is not None:
        arguments = (query, output, keys, values, token_slots, requests, lengths, prefix_lengths, new_lengths)
        return extend(backend, *arguments, encoder_lengths, **named)
    import torch  # noqa: PLC0415 - SGLang's
    from torch.nn.functional import scaled_dot_product_attention  # noqa: PLC0415

    begin = 0
    for request, prefix, new in zip(requests, prefix_lengths.tolist(), new_lengths.tolist(), strict=True):
        slots = token_slots[request, : prefix + new]
        key, value = (cache[slots].to(query.dtype).movedim(0, 1).unsqueeze(0) for cache in (keys, values))
        # a new token sees the cached ones and the new ones up to itself
        mask = torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix) if prefix else None
        attended = scaled_dot_product_attention(
            query[begin : begin + new].movedim(0, 1).unsqueeze(0),
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=named["enable_gqa"],
            scale=named["scaling"],
        )
        output[begin : begin + new] = attended.squeeze(0).movedim(0, 1)
        begin += new
    return output
