"""What SGLang does by itself, without copies of experts: its trivial placement, and EPLB."""

import numpy as np

from shell_router.placement.placement import Gpus, Placement, experts_per_gpu
from shell_router.placement.record import Counts, ExpertRecord
from shell_router.placement.settings import PlacementSettings


def contiguous(record: ExpertRecord, settings: PlacementSettings) -> Placement:
    """The first experts on the first GPU, and so on in every layer: `--init-expert-location trivial`."""
    per_gpu = experts_per_gpu(record.experts, settings.gpus)
    row = np.arange(record.experts) // per_gpu
    return Placement(settings.gpus, np.tile(row, (len(record.activations), 1)))


def eplb(record: ExpertRecord, settings: PlacementSettings) -> Placement:
    """What SGLang's EPLB (`--eplb-algorithm deepseek`) does on one node without redundant experts; written anew here.

    Layer by layer the most activated expert that is left goes to the GPU with the least load that has room. It reads
    activations only. tests/sglang holds it against SGLang's own code.
    """
    per_gpu = experts_per_gpu(record.experts, settings.gpus)
    return Placement(settings.gpus, np.array([packed(row, settings.gpus, per_gpu) for row in record.activations]))


def packed(activations: Counts, gpus: int, per_gpu: int, placed: Gpus | None = None) -> Gpus:
    """The GPU of each expert [experts], most activations first: the least loaded that has fewer than `per_gpu`.

    `placed` has the GPUs of experts that have one already, -1 for the others.
    """
    gpu_of = np.full(len(activations), -1) if placed is None else placed.copy()
    fixed = gpu_of >= 0
    load = np.bincount(gpu_of[fixed], activations[fixed], minlength=gpus)
    room = per_gpu - np.bincount(gpu_of[fixed], minlength=gpus)
    for expert in np.argsort(-activations, kind="stable"):
        if gpu_of[expert] < 0:
            gpu = int(np.argmin(np.where(room > 0, load, np.inf)))
            gpu_of[expert] = gpu
            load[gpu] += activations[expert]
            room[gpu] -= 1
    return gpu_of
