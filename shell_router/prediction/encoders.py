"""Texts to vectors: a frozen sentence-transformers model, or an encoder that was fine-tuned. Needs
torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from shell_router.engines.embedding import default_model
from shell_router.engines.token_states import sentence_transformer
from shell_router.prediction.files import DEFAULT_ENCODER, Encode, Vectors

MOST_TOKENS = 8192
BATCH = 32


def frozen_encoder(named: str, *, device: str, threads: int) -> Encode:
    """A sentence-transformers model as it is: "default", a folder, or a name in the local Hugging
    Face cache.

    A folder of another kind of model gives the means of its last hidden states. A text that is
    longer than the model reads is cut.
    """
    model = sentence_transformer(_folder(named), device=device, threads=threads)

    def encode(texts: Sequence[str]) -> Vectors:
        found = model.encode(
            list(texts), batch_size=BATCH, convert_to_numpy=True, show_progress_bar=False
        )
        return np.asarray(found, dtype=np.float32)

    return encode


def _folder(named: str) -> str:
    if named == DEFAULT_ENCODER:
        return str(default_model())
    return named


def tuned_encoder(folder: Path, *, device: str, threads: int) -> Encode:
    """An encoder and its tokenizer in `folder`, as Hugging Face keeps them."""
    torch.set_num_threads(threads)
    tokenizer, model = loaded(str(folder), device)
    model.eval()

    def encode(texts: Sequence[str]) -> Vectors:
        pieces = [texts[begin : begin + BATCH] for begin in range(0, len(texts), BATCH)]
        with torch.inference_mode():
            return np.concatenate(
                [pooled(model, tokenizer, piece).cpu().numpy() for piece in pieces]
            )

    return encode


def loaded(named: str, device: str) -> tuple[Any, Any]:
    """A tokenizer and an encoder, from the disk alone."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = _folder(named)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    return tokenizer, model.to(device)


def pooled(model: Any, tokenizer: Any, texts: Sequence[str]) -> Any:
    """h_r of the paper: the first token's last state, [texts, features].

    Without a token that begins each text to stand for it, as in decoders: the mean of the last
    states.
    """
    most = min(tokenizer.model_max_length, MOST_TOKENS)
    batch = tokenizer(
        list(texts), padding=True, truncation=True, max_length=most, return_tensors="pt"
    )
    asked = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    states = model(**asked).last_hidden_state.float()
    read = asked["attention_mask"][..., None]
    if tokenizer.cls_token is None:
        return (states * read).sum(1) / read.sum(1)
    return states[:, 0]
