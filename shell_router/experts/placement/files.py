"""Records and placements in files: NumPy's archives, as the plugin writes them, and the JSON that
SGLang loads.
"""

import json
import zipfile
from pathlib import Path

import numpy as np

from shell_router.errors import DataError
from shell_router.experts.placement.records import ExpertRecord, Placement, record_of

RECORDED = "Record one with `shell-router experts record`."
MAP = "physical_to_logical_map"


def read_record(file: Path) -> ExpertRecord:
    """The record in an archive of `activations` [layers, experts] and `transitions` [layers - 1,
    experts, experts].

    Counts of all of the model's layers; `transitions` may be left out. Raises DataError.
    """
    try:
        with file.open("rb") as opened:
            found = np.load(opened, allow_pickle=False)
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise DataError(f"{file} is no archive of arrays.", remedy=RECORDED)
            arrays = {name: found[name] for name in ("activations", "transitions") if name in found}
        return record_of(arrays["activations"], arrays.get("transitions"))
    except OSError as error:
        raise DataError(f"{file}: {error.strerror or error}.", remedy=RECORDED) from error
    except KeyError as error:
        raise DataError(f"{file} has no array {error}.", remedy=RECORDED) from error
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} is no record of experts: {error}.", remedy=RECORDED) from error


def placement_text(placement: Placement, record: ExpertRecord) -> str:
    """What SGLang's `--init-expert-location` takes, a row for each of the model's layers.

    Layers that are not in `record` keep their experts in order. SGLang passes all keys on, so there
    is just one.
    """
    rows = np.tile(np.arange(record.experts), (record.model_layers, 1))
    rows[list(record.layers)] = placement.slots
    return json.dumps({MAP: rows.tolist()}) + "\n"
