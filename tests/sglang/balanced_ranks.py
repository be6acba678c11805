"""One of two ranks that balance experts by real SGLang's `EPLBManager`, recorder and updater: no
model, no server.

python balanced_ranks.py RANK CHOICES.npy MEETING_FILE, in SGLang's environment. CHOICES [passes,
layers, tokens, top-k] are experts. Prints where experts are in the end, and the experts whose
weights this rank holds, layer by layer.
"""

import json
import sys
from types import SimpleNamespace

EXPERTS = 16


def main(rank: int, choices: str, meeting: str) -> None:
    """Record the choices, then let SGLang rebalance once."""
    import numpy as np
    import torch
    from sglang.srt.plugins import load_plugins

    load_plugins()
    passes = torch.from_numpy(np.load(choices))
    layers = passes.shape[1]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    now, recorder, manager, weights = balanced(rank, layers, len(passes))
    for number, chosen in enumerate(passes):
        with recorder.with_forward_pass(number, None):
            for layer in range(layers):
                with recorder.with_current_layer(layer):
                    recorder.on_select_experts(
                        topk_ids=now.logical_to_all_physical_map[layer, :, 0][chosen[layer]]
                    )
        manager.on_forward_pass_end()
    manager.on_forward_pass_end()
    held = [[int(weight) for weight in part[0].flatten()] for part in weights.values()]
    print(json.dumps([now.physical_to_logical_map.tolist(), held]), flush=True)


def balanced(rank: int, layers: int, passes: int) -> tuple:
    """SGLang's metadata, recorder and manager of this rank, and weights that are the numbers of
    their experts.
    """
    import torch
    from sglang.srt.configs.model_config import ModelImpl
    from sglang.srt.eplb import expert_distribution, expert_location
    from sglang.srt.eplb.eplb_manager import EPLBManager
    from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater
    from sglang.srt.runtime_context import get_context, get_parallel

    get_context().override_server_args(
        device="cpu",
        tp_size=2,
        ep_size=2,
        enable_eplb=True,
        ep_dispatch_algorithm="dynamic",
        eplb_rebalance_num_iterations=passes,
        eplb_rebalance_layers_per_chunk=layers,  # without it SGLang times the balance, by CUDA
        expert_distribution_recorder_mode="stat",
        expert_distribution_recorder_buffer_size=passes,
    ).install()
    get_parallel().override_permanently(tp_rank=rank)
    described = SimpleNamespace(
        architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=layers, num_experts=EXPERTS
    )
    model = SimpleNamespace(hf_config=described, quantization=None, model_impl=ModelImpl.AUTO)
    now = expert_location.ExpertLocationMetadata.init_trivial(model, rank)
    expert_location.set_global_expert_location_metadata(now)
    recorder = expert_distribution.ExpertDistributionRecorder.init_new(now, rank)
    expert_distribution.set_global_expert_distribution_recorder(recorder)
    first = rank * now.num_local_physical_experts
    mine = torch.arange(first, first + now.num_local_physical_experts).float()[:, None]
    weights = {layer: [mine.clone()] for layer in range(layers)}
    manager = EPLBManager(
        model_config=model,
        get_model=lambda: SimpleNamespace(routed_experts_weights_of_layer=weights),
        get_expert_location_updater=ExpertLocationUpdater,
        get_expert_backup_client=lambda: None,
        get_weight_updater=lambda: SimpleNamespace(update_weights_from_disk=None),
    )
    return now, recorder, manager, weights


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
