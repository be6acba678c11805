"""What an encoder is to those who train and ask it."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

DEFAULT_ENCODER = "default"
"""The model that the embedder has by default."""

Vectors = NDArray[np.float32]
Encode = Callable[[Sequence[str]], Vectors]
"""Texts to vectors [texts, features]."""
