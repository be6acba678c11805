"""Files of records, in NumPy's archives as the plugin writes them, and of placements for SGLang."""

import json
import zipfile
from pathlib import Path

import numpy as np

from shell_router.errors import DataError
from shell_router.experts.placement.records import ExpertPlacement, ExpertRecord, build_record

RECORDED = "Record one with `shell-router experts record`."
MAP = "physical_to_logical_map"


def read_record(file: Path) -> ExpertRecord:
    """Read an archive of `activations` and, optionally, `transitions`; see `build_record`.

    Raises DataError.
    """
    try:
        with file.open("rb") as opened:
            archive = np.load(opened, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{file} is no archive of arrays.", remedy=RECORDED)
            names = ("activations", "transitions")
            arrays = {name: archive[name] for name in names if name in archive}
        return build_record(arrays["activations"], arrays.get("transitions"))
    except OSError as error:
        raise DataError(f"{file}: {error.strerror or error}.", remedy=RECORDED) from error
    except KeyError as error:
        raise DataError(f"{file} has no array {error}.", remedy=RECORDED) from error
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} is no record of experts: {error}.", remedy=RECORDED) from error


def format_placement(placement: ExpertPlacement, record: ExpertRecord) -> str:
    """Write the JSON for SGLang's `--init-expert-location`, a row for each of the model's layers.

    Layers that are not in `record` keep their experts in order. SGLang passes all keys on, so there
    is only one.
    """
    rows = np.tile(np.arange(record.experts), (record.model_layers, 1))
    rows[list(record.layers)] = placement.slots
    return json.dumps({MAP: rows.tolist()}) + "\n"
