"""The last hidden states of a sentence-transformers model, for the embedding process alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

from shell_router.core.predictors import TokenStates
from shell_router.errors import EngineError

_WINDOW_TOKENS = 512
_BATCH_TOKENS = 8192


def sentence_transformer(name: str, *, device: str, threads: int) -> Any:
    """Load a model from a folder, or by its name in the local Hugging Face cache."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # CPUs are slow at the half precision that weights may be kept in
    if device == "cpu":
        kept_as = {"dtype": torch.float32}
    else:
        kept_as = {}
    return SentenceTransformer(name, device=device, local_files_only=True, model_kwargs=kept_as)


Window = tuple[int, dict[str, list[int]]]
"""The number of a text, and a piece of it as the model reads it, special tokens included."""


class TokenStateModel:
    """Loads a sentence-transformers model once, from a folder or by name, and embeds texts."""

    def __init__(self, model: str, *, device: str, threads: int) -> None:
        self._model: Any = sentence_transformer(model, device=device, threads=threads)
        self._tokenizer: Any = self._model.tokenizer
        if not self._tokenizer.is_fast:
            raise EngineError(
                f"the tokenizer of {model} cannot split long texts into windows.",
                remedy="Choose an embedding model with a `tokenizer.json`.",
            )

    def embed(self, texts: Sequence[str]) -> list[TokenStates]:
        """Return the states [tokens >= 1, features] of each text, its windows stacked in order."""
        windows = self._windows(texts)
        states: dict[int, TokenStates] = {}
        for batch in _batches([len(inputs["input_ids"]) for _, inputs in windows]):
            rows = self._forward([windows[index] for index in batch])
            states.update(zip(batch, rows, strict=True))
        parts: list[list[TokenStates]] = [[] for _ in texts]
        for index, (text, _) in enumerate(windows):
            parts[text].append(states[index])
        return [np.concatenate(part) for part in parts]

    def _windows(self, texts: Sequence[str]) -> list[Window]:
        limit = self._model.max_seq_length or _WINDOW_TOKENS
        encoded = self._tokenizer(
            list(texts), truncation=True, max_length=limit, stride=0, return_overflowing_tokens=True
        )
        owners = encoded.pop("overflow_to_sample_mapping")
        columns = {name: encoded[name] for name in encoded}
        return [
            (text, {name: values[index] for name, values in columns.items()})
            for index, text in enumerate(owners)
        ]

    def _forward(self, windows: Sequence[Window]) -> list[TokenStates]:
        padded = self._tokenizer.pad([inputs for _, inputs in windows], return_tensors="pt")
        with torch.inference_mode():
            inputs = {name: tensor.to(self._model.device) for name, tensor in padded.items()}
            output = self._model[0](inputs)["token_embeddings"].float().cpu().numpy()
        kept = padded["attention_mask"].numpy().astype(bool)
        return [rows[mask] for rows, mask in zip(output, kept, strict=True)]


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group indices by like length; a group, padded to its longest, has `_BATCH_TOKENS`."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if group and (len(group) + 1) * lengths[group[0]] > _BATCH_TOKENS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
