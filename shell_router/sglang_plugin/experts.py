"""Which experts tokens choose, and which follow which: counted next to SGLang's own recorder, on request.

SGLang's `--expert-distribution-recorder-mode` counts activations, layer by layer. Placement also asks which expert of a
layer follows which of the layer before (Gimbal, section V.A.6), so the same choices are counted here, and a dump of
SGLang's record writes these counts to the file that RECORD_FILE names. Without that variable nothing is hooked.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from shell_router.sglang_plugin.compatibility import Feature

logger = logging.getLogger(__name__)

RECORD_FILE: Final = "SHELL_ROUTER_EXPERT_RECORD"
"""The environment variable with the file that a dump writes: one of its own for each server of a machine."""

NEEDED_MODE: Final = "--expert-distribution-recorder-mode stat"


def record_file(variables: Mapping[str, str] = os.environ) -> Path | None:
    """The file that RECORD_FILE names, None where no record is asked for."""
    named = variables.get(RECORD_FILE)
    return Path(named) if named else None


def can_record(server_args: Any, file: Path | None) -> bool:
    """Whether this server records experts to `file`. Says what is wrong where it is asked to and cannot."""
    if file is None:
        return False
    if server_args.expert_distribution_recorder_mode is None:
        logger.error("%s is set, but experts are recorded only with %s.", RECORD_FILE, NEEDED_MODE)
        return False
    if server_args.enable_two_batch_overlap:
        logger.error("Experts are not recorded with --enable-two-batch-overlap: its halves cannot be distinguished.")
        return False
    return True


class RoutingCounts:
    """Counts of one process's tokens: `activations` [layers, experts], `transitions` [layers - 1, experts, experts].

    `transitions[i]` lead from layer i to the next layer that has experts. Float64 tensors on the device that routes,
    made once, so that a CUDA graph which holds `add` counts at each replay.
    """

    def __init__(self, layers: int, experts: int, device: Any) -> None:
        import torch

        self.activations = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        self.transitions = torch.zeros(max(layers - 1, 0), experts, experts, dtype=torch.float64, device=device)
        self._experts = experts
        self._before: tuple[int, Any] | None = None

    def add(self, layer: int, experts: Any) -> None:
        """Count the choice of a layer: `experts` [tokens, top-k], with -1 where a token is padding.

        Layers come in order, pass after pass. A layer is linked to the one before it in its pass if that had the
        same tokens.
        """
        import torch

        column = torch.where(experts < 0, self._experts, experts).long()
        chosen = torch.zeros(len(experts), self._experts + 1, device=experts.device).scatter_(1, column, 1.0)
        chosen = chosen[:, : self._experts]
        self.activations[layer] += chosen.sum(dim=0)
        if self._before is not None:
            earlier, followed = self._before
            if earlier < layer and len(followed) == len(chosen):
                self.transitions[earlier] += followed.T @ chosen
        self._before = (layer, chosen)

    def clear(self) -> None:
        """Count from 0 on."""
        self.activations.zero_()
        self.transitions.zero_()
        self._before = None

    def save(self, file: Path) -> None:
        """Write both as whole numbers to an archive of NumPy's, at once or not at all."""
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
    """The hooks of SGLang's recorders in one process, each with counts of its own; a dump writes them to `file`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._counts: WeakKeyDictionary[Any, RoutingCounts] = WeakKeyDictionary()

    def make_counts(self, _made: None, recorder: Any, *_arguments: Any, **_named: Any) -> None:
        """After a recorder's `__init__`: its counts, before any CUDA graph is captured."""
        places = recorder._expert_location_metadata
        slots = places.physical_to_logical_map
        self._counts[recorder] = RoutingCounts(places.num_layers, places.num_logical_experts, slots.device)

    def count(self, on_select_experts: Callable[..., Any], recorder: Any, topk_ids: Any) -> None:
        """Around a recorder's `on_select_experts`: what SGLang counts is counted here too, as the model's own experts.

        Without an accelerator SGLang is asked only while it records: else it asks CUDA whether a graph is being
        captured, which ends its scheduler.
        """
        import torch

        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if recorder.recording or torch.accelerator.is_available():
            on_select_experts(recorder, topk_ids=topk_ids)
        if (recorder.recording or capturing) and not recorder._disable_all:
            layer = recorder._current_layer_idx.value
            expert_of_slot = recorder._expert_location_metadata.physical_to_logical_map[layer]
            self._counts[recorder].add(layer, logical(topk_ids, expert_of_slot))

    def clear(self, _started: None, recorder: Any) -> None:
        """After a recorder's `start_record`: nothing is counted, and no older file is taken for a new one."""
        self._counts[recorder].clear()
        self._file.unlink(missing_ok=True)

    def write(self, dump_record: Callable[..., Any], recorder: Any, output_mode: str = "file") -> Any:
        """Around a recorder's `dump_record`: a dump to a file writes ours too, of all ranks together, and clears it."""
        dumped = dump_record(recorder, output_mode)
        if output_mode == "file":
            counts = self._counts[recorder]
            if _over_ranks(counts) == 0:
                counts.save(self._file)
                logger.info("Wrote expert activations and transitions to %s", self._file)
            counts.clear()
        return dumped


def logical(slots: Any, expert_of_slot: Any) -> Any:
    """The experts in `slots`, shaped alike; -1 for what is no slot: padding, and shared experts behind the last."""
    import torch

    known = (slots >= 0) & (slots < len(expert_of_slot))
    return torch.where(known, expert_of_slot[torch.where(known, slots, 0).long()], -1)


def _over_ranks(counts: RoutingCounts) -> int:
    """Sum the counts over all ranks, as SGLang sums its own in a dump, and tell this one's number."""
    import torch

    if not torch.distributed.is_initialized():
        return 0
    for part in (counts.activations, counts.transitions):
        torch.distributed.all_reduce(part)
    return int(torch.distributed.get_rank())


RECORDER: Final = "sglang.srt.eplb.expert_distribution._ExpertDistributionRecorderReal"


def feature(file: Path) -> Feature:
    """The hooks that count which experts follow which."""
    counter = ExpertCounter(file)
    return Feature(
        hooks=(
            (f"{RECORDER}.__init__", counter.make_counts, "AFTER"),
            (f"{RECORDER}.start_record", counter.clear, "AFTER"),
            (f"{RECORDER}.on_select_experts", counter.count, "AROUND"),
            (f"{RECORDER}.dump_record", counter.write, "AROUND"),
        ),
        needs=(
            f"{RECORDER}.recording",
            "sglang.srt.server_args.ServerArgs.expert_distribution_recorder_mode",
            "sglang.srt.server_args.ServerArgs.enable_two_batch_overlap",
        ),
        sets={f"{RECORDER}.__init__": ("_expert_location_metadata", "_current_layer_idx", "_disable_all")},
    )
