"""An SGLang plugin for engines without a GPU: prefill attends from new tokens alone, and drafts can be verified.

SGLang's `torch_native` backend attends from every token of a prompt in each prefill and drops what it has for cached
tokens, so an update of 32 tokens costs as much attention as the whole prompt. Kernels of GPUs do not do that. The
results are the same but for rounding. Only where the variable SHELL_ROUTER_CPU_ATTENTION is `new-tokens`, or, for the
passes that verify drafts, where SHELL_ROUTER_DRAFTS is set.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "SHELL_ROUTER_CPU_ATTENTION"
DRAFTS = "SHELL_ROUTER_DRAFTS"
BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def register() -> None:
    """What SGLang calls in each of its processes."""
    drafts = os.environ.get(DRAFTS, "0") not in ("", "0")
    if os.environ.get(VARIABLE) != "new-tokens" and not drafts:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - only SGLang has it

    HookRegistry.register(f"{BACKEND}._run_sdpa_forward_extend", attend_from_new_tokens, HookType.AROUND)
    if drafts:
        HookRegistry.register(f"{BACKEND}.forward_extend", verify, HookType.AROUND)


def verify(
    extend: Callable[..., Any],
    backend: Any,
    query: Any,
    key: Any,
    value: Any,
    layer: Any,
    batch: Any,
    save_kv_cache: bool = True,
) -> Any:
    """Around `forward_extend`: the backend does not know that a pass verifies drafts, which extends every request.

    A token sees those before it, as in prefill; drafts are chains.
    """
    if batch.forward_mode.is_target_verify():
        lengths, batch = batch.seq_lens, copy.copy(batch)
        batch.extend_prefix_lens = lengths
        batch.extend_seq_lens = lengths.new_full(lengths.shape, batch.spec_info.draft_token_num)
        batch.seq_lens = lengths + batch.extend_seq_lens
    return extend(backend, query, key, value, layer, batch, save_kv_cache)


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
