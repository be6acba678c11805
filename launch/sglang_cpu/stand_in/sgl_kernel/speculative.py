"""Stands in for the kernel that reads trees of drafts out of their masks."""

from typing import Any

import torch


def reconstruct_indices_from_tree_mask(
    masks: Any,
    lengths: Any,
    positions: Any,
    places: Any,
    children: Any,
    siblings: Any,
    rows: int,
    width: int,
) -> None:
    """Fill positions [rows * width] and, each [rows, width], places, first children and next
    siblings; -1 is none.

    `masks` [rows * width * width] has the ancestors of each token, and itself; `lengths` [rows] are
    those before it.
    """
    place = torch.arange(width)
    ancestors = masks.view(rows, width, width).bool() & (place < place[:, None])
    positions.copy_((ancestors.sum(2) + lengths[:, None]).flatten())
    places.copy_(torch.arange(rows * width).view(rows, width))
    parents = torch.where(ancestors, place, -1).amax(2)
    children.copy_(_first(ancestors, width))
    of_one_parent = (parents[:, :, None] == parents[:, None, :]) & (place[:, None] > place)
    siblings.copy_(torch.where(parents < 0, -1, _first(of_one_parent, width)))


def _first(found: Any, width: int) -> Any:
    """The first row of each column [rows, width, width] where it is found, else -1."""
    first = torch.where(found, torch.arange(width)[:, None], width).amin(1)
    return torch.where(first < width, first, -1)
