"""The embedding process: texts to token states (`side_work`)."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from shell_router.core.predictors import TokenStates
from shell_router.engines.embedding import check_weights, packed_states
from shell_router.launching.side_work import Work, serve


class Texts(Protocol):
    """What the process needs of a model."""

    def embed(self, texts: Sequence[str]) -> list[TokenStates]: ...


def main() -> None:
    """Serve the model named on the command line."""
    settings = _arguments()
    serve(lambda: embedding(_load(settings)), settings.max_batch)


def embedding(model: Texts) -> Work:
    """`model` as the process's work."""

    def work(bodies: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        return [packed_states(states) for states in model.embed([body.decode() for body in bodies])]

    return work


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shell_router.engines.embedder_process")
    parser.add_argument("--model", required=True)
    parser.add_argument("--sha256", default="", help="what model.safetensors must hash to")
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    return parser.parse_args()


def _load(settings: argparse.Namespace) -> Texts:
    if settings.sha256:
        check_weights(Path(settings.model), settings.sha256)
    # imported late: it takes seconds, in which the end of the input must be seen
    from shell_router.engines.token_states import TokenStateModel  # noqa: PLC0415

    return TokenStateModel(settings.model, device=settings.device, threads=settings.threads)


if __name__ == "__main__":
    main()
