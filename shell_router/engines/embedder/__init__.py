"""Embedders for the early-exit gate: a model in a process of its own, and a hash without meaning."""

from shell_router.engines.embedder.hashed import HashEmbedder
from shell_router.engines.embedder.sentence_transformer import SentenceTransformerEmbedder
from shell_router.engines.embedder.supervised import SupervisedEmbedder

__all__ = ["HashEmbedder", "SentenceTransformerEmbedder", "SupervisedEmbedder"]
