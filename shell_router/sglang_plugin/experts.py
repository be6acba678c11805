"""The plugin's record of MoE experts: which experts tokens choose, and where experts live.

SGLang's `--expert-distribution-recorder-mode` counts activations, layer by layer. Placement also
needs to know which expert of a layer follows which of the layer before (Gimbal, section V.A.6). The
same choices are therefore counted here, and a dump of SGLang's record writes these counts to the
file that RECORD_FILE names. With PLACEMENT, SGLang's balancer (`--enable-eplb`) moves experts on a
running server to the places that the project's algorithm chooses (Algorithm 3, line 8). Without
either variable nothing is hooked.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from shell_router.sglang_plugin.compatibility import Feature, Hook

logger = logging.getLogger(__name__)

RECORD_FILE: Final = "SHELL_ROUTER_EXPERT_RECORD"
"""The environment variable with the file that a dump writes; each server needs its own file."""

PLACEMENT: Final = "SHELL_ROUTER_EXPERT_PLACEMENT"
"""The environment variable with the algorithm that places experts on a running server."""

ALGORITHMS: Final = ("swap", "gimbal")

MARGIN: Final = 0.05
"""The least gain, as a share of load and traffic together, for which experts move.

A move stalls the server.
"""

NEEDED_MODE: Final = "--expert-distribution-recorder-mode stat"


def record_file(variables: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file that RECORD_FILE names, or None if it names none."""
    file = variables.get(RECORD_FILE)
    return Path(file) if file else None


def read_algorithm(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return the algorithm that PLACEMENT names; None, with an error logged, for an unknown one."""
    algorithm = variables.get(PLACEMENT) or None
    if algorithm is None or algorithm in ALGORITHMS:
        return algorithm
    logger.error(
        "%s is %r, and no expert is placed. Set it to one of: %s.",
        PLACEMENT,
        algorithm,
        ", ".join(ALGORITHMS),
    )
    return None


def can_place(server_args: Any, algorithm: str | None) -> bool:
    """Return whether this server's experts are placed; log what is wrong if they should be."""
    if algorithm is None:
        return False
    wrong = [
        needed
        for needed, holds in (
            ("--enable-eplb", server_args.enable_eplb),
            ("--ep-num-redundant-experts 0", server_args.ep_num_redundant_experts == 0),
            ("no --elastic-ep-backend", server_args.elastic_ep_backend is None),
            ("no --enable-two-batch-overlap", not server_args.enable_two_batch_overlap),
        )
        if not holds
    ]
    if wrong:
        logger.error(
            "%s is set, but experts are placed only with %s.", PLACEMENT, " and ".join(wrong)
        )
    return not wrong


def can_record(server_args: Any, file: Path | None) -> bool:
    """Return whether this server records experts to `file`; log what is wrong if it should."""
    if file is None:
        return False
    if server_args.expert_distribution_recorder_mode is None:
        logger.error("%s is set, but experts are recorded only with %s.", RECORD_FILE, NEEDED_MODE)
        return False
    if server_args.enable_two_batch_overlap:
        logger.error(
            "Experts are not recorded with --enable-two-batch-overlap: its halves cannot be "
            "distinguished."
        )
        return False
    return True


class RoutingCounts:
    """The counts of one process's tokens.

    `activations` is [layers, experts] and `transitions` [layers - 1, experts, experts];
    `transitions[i]` leads from layer i to the next layer that has experts. Both are float64 tensors
    on the device that routes, made once, so that a CUDA graph which holds `add` counts at each
    replay.
    """

    def __init__(self, layers: int, experts: int, device: Any) -> None:
        import torch

        self.activations = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        self.transitions = torch.zeros(
            max(layers - 1, 0), experts, experts, dtype=torch.float64, device=device
        )
        self._experts = experts
        self._before: tuple[int, Any] | None = None

    def add(self, layer: int, experts: Any) -> None:
        """Count the choice of a layer: `experts` [tokens, top-k], with -1 where a token is padding.

        Layers come in order, pass after pass. A layer is linked to the one before it in its pass if
        both had the same tokens.
        """
        import torch

        column = torch.where(experts < 0, self._experts, experts).long()
        chosen = torch.zeros(len(experts), self._experts + 1, device=experts.device).scatter_(
            1, column, 1.0
        )
        chosen = chosen[:, : self._experts]
        self.activations[layer] += chosen.sum(dim=0)
        if self._before is not None:
            earlier, followed = self._before
            if earlier < layer and len(followed) == len(chosen):
                self.transitions[earlier] += followed.T @ chosen
        self._before = (layer, chosen)

    def clear(self) -> None:
        """Set all counts to 0."""
        self.activations.zero_()
        self.transitions.zero_()
        self._before = None

    def save(self, file: Path) -> None:
        """Write both as whole numbers to a NumPy archive, atomically."""
        import numpy as np

        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        with partial.open("wb") as opened:
            np.savez_compressed(
                opened,
                activations=self.activations.cpu().numpy().astype(np.int64),
                transitions=self.transitions.cpu().numpy().astype(np.int64),
            )
        partial.replace(file)


class ExpertCounter:
    """The hooks of SGLang's recorders in one process, each with its own counts.

    A dump writes the counts to `file`.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._counts: WeakKeyDictionary[Any, RoutingCounts] = WeakKeyDictionary()

    def make_counts(self, _made: None, recorder: Any, *_arguments: Any, **_keywords: Any) -> None:
        """Make a recorder's counts before any CUDA graph is captured. Runs after its `__init__`."""
        places = recorder._expert_location_metadata
        slots = places.physical_to_logical_map
        self._counts[recorder] = RoutingCounts(
            places.num_layers, places.num_logical_experts, slots.device
        )

    def count(self, on_select_experts: Callable[..., Any], recorder: Any, topk_ids: Any) -> None:
        """Count the choices that SGLang counts, as the model's own experts.

        Runs around a recorder's `on_select_experts`. Without an accelerator SGLang is called only
        while it records: else it asks CUDA whether a graph is being captured, which ends its
        scheduler.
        """
        import torch

        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if recorder.recording or torch.accelerator.is_available():
            on_select_experts(recorder, topk_ids=topk_ids)
        if (recorder.recording or capturing) and not recorder._disable_all:
            layer = recorder._current_layer_idx.value
            expert_of_slot = recorder._expert_location_metadata.physical_to_logical_map[layer]
            self._counts[recorder].add(layer, map_to_logical(topk_ids, expert_of_slot))

    def clear(self, _started: None, recorder: Any) -> None:
        """Set the counts to 0 and delete an older file, so that it is not taken for a new one.

        Runs after a recorder's `start_record`.
        """
        self._counts[recorder].clear()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def write(
        self, dump_record: Callable[..., Any], recorder: Any, output_mode: str = "file"
    ) -> Any:
        """Write and clear the counts of all ranks when SGLang dumps its record to a file.

        Runs around a recorder's `dump_record`.
        """
        dumped = dump_record(recorder, output_mode)
        if output_mode == "file" and self._file is not None:
            counts = self._counts[recorder]
            if _sum_over_ranks(counts.activations, counts.transitions) == 0:
                counts.save(self._file)
                logger.info("Wrote expert activations and transitions to %s", self._file)
            counts.clear()
        return dumped

    def transitions(self, recorder: Any) -> Any:
        """Return the transitions of all ranks since recording began or since the last dump."""
        summed = self._counts[recorder].transitions.clone()
        _sum_over_ranks(summed)
        return summed


class LivePlacement:
    """The hook of SGLang's `EPLBManager` in one process, which places experts by `algorithm`."""

    def __init__(self, algorithm: str, counter: ExpertCounter) -> None:
        self._algorithm = algorithm
        self._counter = counter

    def compute(
        self, sglangs: Callable[..., Any], manager: Any, logical_count: Any, **keywords: Any
    ) -> Any:
        """Return the new metadata. Runs around `EPLBManager._compute_expert_location_metadata`.

        `logical_count` [(steps,) layers, experts] has been summed over all ranks. The first rank
        places, so that all agree; the others wait for it, as they wait for the experts that move.
        """
        import torch
        from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
        from sglang.srt.eplb.expert_location import (
            ExpertLocationMetadata,
            get_global_expert_location_metadata,
        )
        from sglang.srt.runtime_context import get_exec

        now = get_global_expert_location_metadata()
        in_halves = get_exec().overlap.enable_two_batch_overlap
        if (
            now.num_physical_experts != now.num_logical_experts
            or in_halves
            or keywords.get("broadcast_over_world")
        ):
            return sglangs(manager, logical_count, **keywords)  # `can_place` has said why
        transitions = self._counter.transitions(get_global_expert_distribution_recorder())
        slots = now.physical_to_logical_map.clone().contiguous()
        is_shared = torch.distributed.is_initialized()
        if not is_shared or torch.distributed.get_rank() == 0:
            counted = logical_count.reshape(-1, *slots.shape).sum(dim=0).cpu().numpy()
            placement = place_experts(
                self._algorithm,
                counted,
                transitions.cpu().numpy(),
                slots.cpu().numpy(),
                now.ep_size,
            )
            slots.copy_(torch.from_numpy(placement))
        if is_shared:
            torch.distributed.broadcast(slots, src=0)
        return ExpertLocationMetadata.init_by_mapping(manager._model_config, slots)


def place_experts(algorithm: str, activations: Any, transitions: Any, slots: Any, gpus: int) -> Any:
    """Return the expert in each slot [layers, experts], as `slots` has them at present.

    The result is `slots` if moving gains too little, or if nothing can be placed: a running engine
    must not end for it.
    """
    from shell_router.errors import ConfigError
    from shell_router.experts.placement import build_record, measure_placement, place
    from shell_router.experts.placement.records import judge_gain, placement_from_slots

    try:
        record = build_record(activations, transitions)
        layers = list(record.layers)
        now = placement_from_slots(slots[layers], gpus)
        new = place(algorithm, record, gpus)
    except (ConfigError, ValueError) as error:
        logger.error("Experts stay where they are: %s", error)
        return slots
    moves, reason = judge_gain(
        measure_placement(record, now), measure_placement(record, new), MARGIN
    )
    logger.info("Experts %s by %s, %s", "move" if moves else "stay", algorithm, reason)
    if not moves:
        return slots
    placement = slots.copy()
    placement[layers] = new.slots
    return placement


def map_to_logical(slots: Any, expert_of_slot: Any) -> Any:
    """Return the experts in `slots`, in the same shape.

    The result is -1 for numbers that are no slot: padding, and shared experts behind the last.
    """
    import torch

    is_slot = (slots >= 0) & (slots < len(expert_of_slot))
    return torch.where(is_slot, expert_of_slot[torch.where(is_slot, slots, 0).long()], -1)


def _sum_over_ranks(*counts: Any) -> int:
    """Sum the counts over all ranks, as SGLang does in a dump; return this rank's number."""
    import torch

    if not torch.distributed.is_initialized():
        return 0
    for part in counts:
        torch.distributed.all_reduce(part)
    return int(torch.distributed.get_rank())


RECORDER: Final = "sglang.srt.eplb.expert_distribution._ExpertDistributionRecorderReal"


EPLB: Final = "sglang.srt.eplb"
ARGUMENTS: Final = "sglang.srt.server_args.ServerArgs"


def make_feature(file: Path | None, algorithm: str | None) -> Feature:
    """Return the hooks that count transitions between experts, and place experts by `algorithm`."""
    counter = ExpertCounter(file)
    placing: Sequence[Hook] = ()
    needed: Sequence[str] = ()
    if algorithm is not None:
        compute = LivePlacement(algorithm, counter).compute
        placing = (
            (
                f"{EPLB}.eplb_manager.EPLBManager._compute_expert_location_metadata",
                compute,
                "AROUND",
            ),
        )
        needed = (
            f"{EPLB}.expert_distribution.get_global_expert_distribution_recorder",
            f"{EPLB}.expert_location.get_global_expert_location_metadata",
            f"{EPLB}.expert_location.ExpertLocationMetadata.init_by_mapping",
            "sglang.srt.runtime_context.get_exec",
            *(
                f"{ARGUMENTS}.{name}"
                for name in ("enable_eplb", "ep_num_redundant_experts", "elastic_ep_backend")
            ),
        )
    return Feature(
        hooks=(
            *placing,
            (f"{RECORDER}.__init__", counter.make_counts, "AFTER"),
            (f"{RECORDER}.start_record", counter.clear, "AFTER"),
            (f"{RECORDER}.on_select_experts", counter.count, "AROUND"),
            (f"{RECORDER}.dump_record", counter.write, "AROUND"),
        ),
        needs=(
            f"{RECORDER}.recording",
            f"{ARGUMENTS}.expert_distribution_recorder_mode",
            f"{ARGUMENTS}.enable_two_batch_overlap",
            *needed,
        ),
        sets={
            f"{RECORDER}.__init__": (
                "_expert_location_metadata",
                "_current_layer_idx",
                "_disable_all",
            )
        },
    )
