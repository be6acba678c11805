"""Encoders of texts: a frozen sentence-transformers model, or a fine-tuned one. Needs torch."""

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


def load_frozen_encoder(name: str, *, device: str, threads: int) -> Encode:
    """Load a sentence-transformers model as it is.

    It is "default", a folder, or a name in the local Hugging Face cache. A folder of another kind
    of model gives the means of its last hidden states. A text beyond the model's length is cut.
    """
    model = sentence_transformer(_find_folder(name), device=device, threads=threads)

    def encode(texts: Sequence[str]) -> Vectors:
        vectors = model.encode(
            list(texts), batch_size=BATCH, convert_to_numpy=True, show_progress_bar=False
        )
        return np.asarray(vectors, dtype=np.float32)

    return encode


def _find_folder(name: str) -> str:
    if name == DEFAULT_ENCODER:
        return str(default_model())
    return name


def load_tuned_encoder(folder: Path, *, device: str, threads: int) -> Encode:
    """Load an encoder and its tokenizer from `folder`, in Hugging Face's form."""
    torch.set_num_threads(threads)
    tokenizer, model = load_model(str(folder), device)
    model.eval()

    def encode(texts: Sequence[str]) -> Vectors:
        vectors = []
        with torch.inference_mode():
            for begin in range(0, len(texts), BATCH):
                batch = texts[begin : begin + BATCH]
                vectors.append(pool_states(model, tokenizer, batch).cpu().numpy())
        return np.concatenate(vectors)

    return encode


def load_model(name: str, device: str) -> tuple[Any, Any]:
    """Load a tokenizer and an encoder from the disk alone."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = _find_folder(name)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    return tokenizer, model.to(device)


def pool_states(model: Any, tokenizer: Any, texts: Sequence[str]) -> Any:
    """Return one vector per text [texts, features]: the last state of the first token (h_r).

    A model without a class token, such as a decoder, gives the mean of the last states.
    """
    most = min(tokenizer.model_max_length, MOST_TOKENS)
    batch = tokenizer(
        list(texts), padding=True, truncation=True, max_length=most, return_tensors="pt"
    )
    inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    states = model(**inputs).last_hidden_state.float()
    mask = inputs["attention_mask"][..., None]
    if tokenizer.cls_token is None:
        return (states * mask).sum(1) / mask.sum(1)
    return states[:, 0]
