"""An SGLang plugin for engines without a GPU: kernels that take less time than those SGLang has for
a CPU.

Results are the same but for rounding.

- Products with weights. For 3 or 4 rows in float32, PyTorch's `linear` takes twice as long as
  oneDNN with reordered weights. The reordered copy doubles the memory of the weights.
- Attention of decoding. SGLang's `torch_native` backend copies keys and values for every query
  head.
- Attention of prefill, only where the variable SHELL_ROUTER_CPU_ATTENTION is `new-tokens`:
  `torch_native` attends from every token of a prompt and drops what it has for cached tokens, so an
  update of 32 tokens costs as much attention as the whole prompt. Kernels of GPUs do not do that.

Where SHELL_ROUTER_DRAFTS is set, passes that verify drafts work as well.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "SHELL_ROUTER_CPU_ATTENTION"
DRAFTS = "SHELL_ROUTER_DRAFTS"
LAYERS = "sglang.srt.layers"
BACKEND = f"{LAYERS}.attention.torch_native_backend.TorchNativeAttnBackend"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
LOADERS = (
    *("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"),
    *("receive_weights_from_distributed", "load_weights_from_distributed"),
)
FEW_ROWS = 4
"""Weights reordered for this number of rows are the fastest ones from 1 row to 16, and no slower
with hundreds.
"""


def register() -> None:
    """What SGLang calls in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Callable[..., Any]] = {
        f"{LAYERS}.quantization.unquant.UnquantizedLinearMethod.apply": multiply,
        f"{LAYERS}.quantization.unquant.UnquantizedEmbeddingMethod.apply": multiply,
        f"{LAYERS}.logits_processor.should_apply_lm_head_quant_method": multiply_logits,
        f"{BACKEND}._run_sdpa_forward_decode": decode,
        **{f"{UPDATER}.{loader}": load_anew for loader in LOADERS},
    }
    drafts = os.environ.get(DRAFTS, "0") not in ("", "0")
    if drafts or os.environ.get(VARIABLE) == "new-tokens":
        hooks[f"{BACKEND}._run_sdpa_forward_extend"] = attend_from_new_tokens
    if drafts:
        hooks[f"{BACKEND}.forward_extend"] = verify
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def multiply(
    linear: Callable[..., Any], method: Any, layer: Any, rows: Any, bias: Any = None
) -> Any:
    """Around `apply`: `rows` [..., inputs] by the layer's weights [outputs, inputs], with weights
    reordered once.
    """
    import torch

    weight = layer.weight
    if not weight.dtype == rows.dtype == torch.float32 or not rows.numel():
        return linear(method, layer, rows, bias)
    state = (weight.data_ptr(), weight._version, _loads[0])
    if getattr(layer, "reordered_state", None) != state:
        layer.reordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS)
        layer.reordered_state = state
    return torch.ops.mkldnn._linear_pointwise(rows, layer.reordered, bias, "none", [], "")


def load_anew(load: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Around what loads weights into a model that runs: through `.data`, which counts no version of
    the weights.
    """
    try:
        return load(*given, **named)
    finally:
        _loads[0] += 1


_loads = [0]
"""How often that was."""


def multiply_logits(applies: Callable[..., bool], lm_head: Any, quant_method: Any) -> bool:
    """Around `should_apply_lm_head_quant_method`: logits are products with weights, too."""
    return type(quant_method).__name__ == "UnquantizedEmbeddingMethod" or applies(
        lm_head, quant_method
    )


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
    """Around `forward_extend`: the backend does not know that a pass verifies drafts, which extends
    every request.

    A token sees those before it, as in prefill; drafts are chains.
    """
    if batch.forward_mode.is_target_verify():
        lengths, batch = batch.seq_lens, copy.copy(batch)
        batch.extend_prefix_lens = lengths
        batch.extend_seq_lens = lengths.new_full(lengths.shape, batch.spec_info.draft_token_num)
        batch.seq_lens = lengths + batch.extend_seq_lens
    return extend(backend, query, key, value, layer, batch, save_kv_cache)


def decode(
    run: Callable[..., Any],
    backend: Any,
    query: Any,
    output: Any,
    keys: Any,
    values: Any,
    token_slots: Any,
    requests: Any,
    lengths: Any,
    encoder_lengths: Any = None,
    **named: Any,
) -> Any:
    """Around `_run_sdpa_forward_decode`: one new token for each request."""
    before = (query, output, keys, values, token_slots, requests, lengths)
    if encoder_lengths is not None or named["sliding_window_size"] is not None:
        return run(backend, *before, encoder_lengths, **named)
    return attend_from_new_tokens(
        run,
        backend,
        *before,
        lengths - 1,
        lengths.new_ones(lengths.shape),
        **{**named, "causal": True},
    )


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
    """Around `_run_sdpa_forward_extend`: fills `output` [new tokens, heads, head size] and returns
    it.
    """
    if (
        encoder_lengths is not None
        or not named["causal"]
        or named["sliding_window_size"] is not None
    ):
        arguments = (
            query,
            output,
            keys,
            values,
            token_slots,
            requests,
            lengths,
            prefix_lengths,
            new_lengths,
        )
        return extend(backend, *arguments, encoder_lengths, **named)
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    heads, size, begin = keys.shape[1], query.shape[2], 0
    for request, prefix, new in zip(
        requests.tolist(), prefix_lengths.tolist(), new_lengths.tolist(), strict=True
    ):
        slots = token_slots[request, : prefix + new]
        key, value = (
            cache.index_select(0, slots).to(query.dtype).movedim(0, 1)[None]
            for cache in (keys, values)
        )
        # [heads of the cache, queries that share one, new tokens, head size]
        asked = query[begin : begin + new].view(new, heads, -1, size).permute(1, 2, 0, 3)
        if prefix:
            # all queries that share a head are put in one row, so that its keys and values are not
            # copied for each; a new token sees the cached ones and the new ones up to itself
            mask = torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix) if new > 1 else None
            mask = mask if mask is None else mask.repeat(asked.shape[1], 1)
            rows = asked.reshape(1, heads, -1, size)
            attended = scaled_dot_product_attention(
                rows, key, value, attn_mask=mask, scale=named["scaling"]
            )
        else:
            rows = asked.reshape(1, -1, new, size)
            attended = scaled_dot_product_attention(
                rows,
                key,
                value,
                is_causal=True,
                enable_gqa=named["enable_gqa"],
                scale=named["scaling"],
            )
        output[begin : begin + new] = attended.view(-1, new, value.shape[-1]).movedim(0, 1)
        begin += new
    return output
