"""A prefix cache by token ids, as SGLang's radix cache: what was prefilled once need not be
computed again.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any


class Node:
    """A run of ids that follows its parent's, with what a subclass of the cache keeps for them."""

    __slots__ = ("children", "ids", "kv", "parent", "pins")

    def __init__(self, ids: Sequence[int], parent: "Node | None", pins: int = 0) -> None:
        self.ids = ids
        self.parent = parent
        self.pins = pins
        self.children: dict[int, Node] = {}
        self.kv: Any = None


class PrefixCache:
    """Holds at most `capacity` tokens of prompts; the least recently used leave first, ends before
    beginnings.

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
        """How many of the leading ids are cached, which counts as their use."""
        node, matched = self._descend(ids, owner)
        self._touch(node)
        return matched

    def add(self, ids: Sequence[int], owner: Hashable = None) -> None:
        """Cache the ids, or those of the leading ones that fit."""
        node, start, stop = self._make_room(ids, owner)
        self._touch(self._grow(node, ids[start:stop]) if start < stop else node)

    def _descend(self, ids: Sequence[int], owner: Hashable) -> tuple[Node, int]:
        """The last node of the way that `ids` go, split where they leave it, and how many ids lie
        on that way.
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
        """Evict until `ids` fit: the node they continue, and the part of them that is to be added
        there.
        """
        wanted = min(len(ids), self.capacity)
        node, start = self._descend(ids[:wanted] if wanted < len(ids) else ids, owner)
        if self.tokens + wanted - start > self.capacity:
            self._touch(node)
        while self.tokens + wanted - start > self.capacity:
            # what was just touched comes last, and `node` first of it: when it is reached all else
            # is gone or pinned
            oldest = next((one for one in self._nodes if not one.pins), node)
            if oldest is node:
                break
            self._drop(oldest)
        return node, start, min(wanted, start + self.capacity - self.tokens)

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
        """From the end to the beginning, so that no node is younger than the one it follows."""
        for each in upwards(node):
            self._nodes.move_to_end(each)

    def _drop(self, node: Node) -> None:
        assert node.parent is not None and not node.children
        del self._nodes[node]
        del node.parent.children[node.ids[0]]
        self.tokens -= len(node.ids)


def upwards(node: Node) -> Iterator[Node]:
    """The node and all above it but the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix, by bisection: slices compare at memory speed."""
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
