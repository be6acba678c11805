"""Token states without a model."""

import hashlib

import numpy as np

from shell_router.core.embedding import TokenStates


class HashEmbedder:
    """Turns every word into pseudo-random features, the same ones always and everywhere.

    It knows no meaning: texts agree as far as they share words. For tests, simulation, and the scripted
    engines.
    """

    def __init__(self, features: int = 64) -> None:
        if features < 1:
            raise ValueError(f"features must be at least 1, not {features}")
        self._features = features

    async def embed(self, text: str) -> TokenStates:
        """One row of features in (-1, 1) per word; an empty text has one row. Returns at once."""
        words = text.split() or [""]
        digests = b"".join(hashlib.shake_128(word.encode()).digest(self._features) for word in words)
        signed = np.frombuffer(digests, dtype=np.int8).reshape(len(words), self._features)
        # the half keeps every feature off zero
        return (signed.astype(np.float32) + np.float32(0.5)) / np.float32(128)
