"""The shared embedding model of the early-exit gate."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

TokenStates = NDArray[np.float32]
"""Last-layer hidden states of one text, shape [tokens, features]."""


class Embedder(Protocol):
    """Embeds whole texts into per-token states, off the event loop's thread."""

    async def embed(self, text: str) -> TokenStates:
        """Last-layer hidden states of `text`, shape [tokens >= 1, features]."""
        ...
