"""A prefix cache by token ids, as SGLang's radix cache."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any


class Node:
    """A run of ids that follows its parent's, with the data that a subclass keeps for them."""

    __slots__ = ("children", "ids", "kv", "parent", "pins")

    def __init__(self, ids: Sequence[int], parent: "Node | None", pins: int = 0) -> None:
        self.ids = ids
        self.parent = parent
        self.pins = pins
        self.children: dict[int, Node] = {}
        self.kv: Any = None


class PrefixCache:
    """A cache of at most `capacity` tokens of prompts, evicted by least recent use, ends first.

    Prompts are all lists, all tuples or all bytes. Each `owner` has prefixes of its own (SGLang's
    extra key); all share the capacity. Not thread-safe.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._roots: dict[Hashable, Node] = {}
        # least recently used first; a node stands after all that follow it
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def match(self, ids: Sequence[int], owner: Hashable = None) -> int:
        """Return how many of the leading ids are cached, and count them as used."""
        node, matched = self._descend(ids, owner)
        self._touch(node)
        return matched

    def add(self, ids: Sequence[int], owner: Hashable = None) -> None:
        """Cache the ids, or as many of the leading ones as fit."""
        node, start, stop = self._make_room(ids, owner)
        self._touch(self._grow(node, ids[start:stop]) if start < stop else node)

    def _descend(self, ids: Sequence[int], owner: Hashable) -> tuple[Node, int]:
        """Return the last node on the path of `ids`, and how many ids lie on that path.

        A node that the path leaves within its ids is split there.
        """
        node = self._roots.get(owner)
        if node is None:
            node = self._roots[owner] = Node((), None)
        at = 0
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            if ids[at : at + len(child.ids)] == child.ids:
                node = child
                at = at + len(child.ids)
                continue
            shared = _common(child.ids, ids[at:])
            return self._split(child, shared), at + shared
        return node, at

    def _make_room(self, ids: Sequence[int], owner: Hashable) -> tuple[Node, int, int]:
        """Evict until `ids` fit; return the node to continue, and the ids' part to add there."""
        size = min(len(ids), self.capacity)
        node, start = self._descend(ids[:size] if size < len(ids) else ids, owner)
        if self.tokens + size - start > self.capacity:
            self._touch(node)
        while self.tokens + size - start > self.capacity:
            # what was just touched comes last, and `node` first of it: when it is reached all else
            # is gone or pinned
            oldest = next((other for other in self._nodes if not other.pins), node)
            if oldest is node:
                break
            self._drop(oldest)
        return node, start, min(size, start + self.capacity - self.tokens)

    def _grow(self, parent: Node, ids: Sequence[int]) -> Node:
        node = Node(ids, parent)
        parent.children[ids[0]] = node
        self._nodes[node] = None
        self.tokens += len(ids)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Divide a node's ids at `at`; the new node holds those before, and has the same pins."""
        assert node.parent is not None
        before = Node(node.ids[:at], node.parent, node.pins)
        node.parent.children[before.ids[0]] = before
        node.ids = node.ids[at:]
        node.parent = before
        before.children[node.ids[0]] = node
        self._nodes[before] = None
        return before

    def _touch(self, node: Node) -> None:
        """Mark a node and those above it as used, so that none is older than a child of it."""
        for each in iterate_upwards(node):
            self._nodes.move_to_end(each)

    def _drop(self, node: Node) -> None:
        assert node.parent is not None and not node.children
        del self._nodes[node]
        del node.parent.children[node.ids[0]]
        self.tokens -= len(node.ids)


def iterate_upwards(node: Node) -> Iterator[Node]:
    """Iterate over the node and all above it but the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix, by bisection: slices compare at memory speed."""
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
