"""Make a small model with random weights: python -m shell_router.launching.weights FOLDER"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from shell_router.config import RandomWeights


def make_random_model(weights: RandomWeights, folder: Path) -> Path:
    """Write the model into `folder` and return it; the same `weights` give the same files. Needs safetensors."""
    from shell_router.engines.embedded.checkpoint import make_checkpoint  # noqa: PLC0415 - needs an extra

    heads = weights.hidden // 16
    return make_checkpoint(
        folder, hidden=weights.hidden, layers=weights.layers, heads=heads, kv_heads=heads // 2, seed=weights.seed
    )


def main() -> int:
    default = RandomWeights()
    parser = argparse.ArgumentParser(prog="python -m shell_router.launching.weights", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=default.hidden, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=default.layers)
    parser.add_argument("--seed", type=int, default=default.seed)
    given = parser.parse_args()
    if find_spec("safetensors") is None:
        print("random weights need safetensors: pip install 'shell-router[embedded]'", file=sys.stderr)
        return 2
    make_random_model(RandomWeights(given.hidden, given.layers, given.seed), given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
