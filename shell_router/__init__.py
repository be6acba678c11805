"""Serves Mixture-of-Agents requests on prefill-decode engine pairs."""

from pathlib import Path

__version__ = "0.1.0"

_PACKED = Path(__file__).parent / "shipped"
if _PACKED.is_dir():
    SHIPPED = _PACKED
else:
    SHIPPED = Path(__file__).parents[1]
"""The folder with `configs`, `topologies` and `models`: a wheel's own, or in a clone the
repository.
"""
