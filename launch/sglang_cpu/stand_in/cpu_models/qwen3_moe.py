"""Qwen3's mixture of experts with its experts spread over ranks without a GPU.

SGLang's product for a CPU without AMX (`fused_moe_native.moe_forward_native`) takes an expert of
another rank, -1, for an index, and ends its scheduler. Here each rank multiplies only by its own
experts; all else is SGLang's.
"""

from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.models import qwen3_moe


class LocalExperts(UnquantizedFusedMoEMethod):
    """Products with this rank's experts: a token's part of the sum that SGLang makes over all
    ranks.
    """

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """See SGLang's."""
        rows, (weights, ids, logits) = dispatch_output.hidden_states, dispatch_output.topk_output
        here = ids >= 0
        token, summed = here.nonzero()[:, 0], torch.zeros_like(rows)
        if len(token):
            each = StandardTopKOutput(weights[here][:, None], ids[here][:, None], logits)
            summed.index_add_(
                0, token, moe_forward_native(layer, rows[token], each, self.moe_runner_config)
            )
        return StandardCombineInput(hidden_states=summed)


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):
    """SGLang's class of that name but for the products of its experts."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        blocks = [layer.mlp for layer in self.model.layers if hasattr(layer.mlp, "experts")]
        for experts in [block.experts for block in blocks]:
            method = LocalExperts()
            method.create_moe_runner(experts, experts.moe_runner_config)
            experts.quant_method = method


EntryClass = Qwen3MoeForCausalLM
