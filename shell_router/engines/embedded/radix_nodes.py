"""The nodes of the prefix cache's radix trees, and ways through them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

TokenIds = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Node:
    """An edge of the tree: its tokens and their KV, `[layers, 2, kv_heads, tokens, head_dim]`."""

    tokens: TokenIds
    kv: Tensor
    parent: "Node | None"
    last_used: int = 0
    pins: int = 0
    children: "dict[int, Node]" = field(default_factory=dict)


def walk(root: Node, wanted: TokenIds) -> Iterator[tuple[Node, int]]:
    """The nodes along `wanted` with the tokens shared with each; only the last may share less than all."""
    node, start = root, 0
    while start < len(wanted):
        child = node.children.get(int(wanted[start]))
        if child is None:
            return
        shared = _common_prefix(child.tokens, wanted[start:])
        partial = shared < len(child.tokens)
        yield child, shared
        if partial:  # asked before the yield: whoever walks may split the child
            return
        node, start = child, start + shared


def _common_prefix(left: TokenIds, right: TokenIds) -> int:
    count = min(len(left), len(right))
    differing = np.flatnonzero(left[:count] != right[:count])
    return int(differing[0]) if len(differing) else count


def upwards(node: Node | None) -> Iterator[Node]:
    """The node and all above it."""
    while node is not None:
        yield node
        node = node.parent


def nodes_of(root: Node) -> Iterator[Node]:
    """All nodes of a tree, its root among them."""
    # without recursion: a prompt that grew token by token is a tree as deep as it is long
    pending = [root]
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node


def sequences_of(root: Node) -> Iterator[tuple[int, ...]]:
    """The tokens from the root to each leaf."""
    pending: list[tuple[Node, tuple[int, ...]]] = [(root, ())]
    while pending:
        node, above = pending.pop()
        here = above + tuple(node.tokens.tolist())
        pending.extend((child, here) for child in node.children.values())
        if not node.children and here:
            yield here
