"""Placements that were written for SGLang."""

import json
from pathlib import Path

import numpy as np

from shell_router.experts.placement import ExpertPlacement, ExpertRecord
from shell_router.experts.placement.files import MAP
from shell_router.experts.placement.records import placement_from_slots


def placement_in(file: Path, record: ExpertRecord, gpus: int) -> ExpertPlacement:
    """The placement in such a file, of the layers that are in `record`."""
    return placement_from_slots(
        np.array(json.loads(file.read_bytes())[MAP])[list(record.layers)], gpus
    )
