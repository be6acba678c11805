"""The gate's embedding model: any sentence-transformers model, in a process of its own."""

import os
import sys
from pathlib import Path

from shell_router.engines.embedder.default_model import WEIGHTS_SHA256, default_model
from shell_router.engines.embedder.supervised import SupervisedEmbedder


class SentenceTransformerEmbedder(SupervisedEmbedder):
    """Last-layer hidden states of every token, so that the router imports no torch and never waits for one.

    `model` is a folder, a name in the local Hugging Face cache (nothing is downloaded), or None for the MiniLM
    model that comes with `shell-router[embedded]`, whose weights are checked at every start. Texts that wait
    are embedded together, `max_batch` at most. One longer than the model reads at once is embedded in windows
    without overlap, each with the model's special tokens, and their rows are stacked: nothing is cut off.
    ConfigError without the default model's package.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "cpu",
        threads: int = 1,
        max_batch: int = 16,
        timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        if threads < 1 or max_batch < 1:
            raise ValueError(f"threads and max_batch must be at least 1, not {threads}, {max_batch}")
        command = [sys.executable, "-m", "shell_router.engines.embedder.process"]
        command += ["--model", str(model or default_model()), "--device", device]
        command += ["--threads", str(threads), "--max-batch", str(max_batch)]
        if model is None:
            command += ["--sha256", WEIGHTS_SHA256]
        offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        env = {**os.environ, **offline, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
        super().__init__(command, env, timeout_s=timeout_s, start_timeout_s=start_timeout_s)
