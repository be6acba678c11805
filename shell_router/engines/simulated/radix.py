"""A prefix cache by token ids, as SGLang's radix cache: what was prefilled once need not be again."""

from collections import OrderedDict
from collections.abc import Sequence


class _Node:
    """A run of ids that follows its parent's."""

    __slots__ = ("children", "ids", "parent")

    def __init__(self, ids: Sequence[int], parent: "_Node | None") -> None:
        self.ids = ids
        self.parent = parent
        self.children: dict[int, _Node] = {}


class RadixCache:
    """Holds at most `room` tokens; what was used longest ago leaves first, ends before beginnings."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._root = _Node((), None)
        self._nodes: OrderedDict[_Node, None] = OrderedDict()  # a node stands after all that follow it
        self.tokens = 0

    def match(self, ids: Sequence[int]) -> int:
        """How many of the leading ids are there."""
        node, matched = self._descend(ids)
        self._touch(node)
        return matched

    def add(self, ids: Sequence[int]) -> None:
        """Remember ids, as many of the leading ones as there is room for."""
        if len(ids) > self._room:
            ids = ids[: self._room]
        node, matched = self._descend(ids)
        if matched < len(ids):
            node = self._grow(node, ids[matched:])
        self._touch(node)
        while self.tokens > self._room:
            self._drop_oldest()

    def _descend(self, ids: Sequence[int]) -> tuple[_Node, int]:
        """The last node of the way that `ids` go, split where they leave it, and how many ids lie on that way."""
        node, at = self._root, 0
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            if ids[at : at + len(child.ids)] == child.ids:
                node, at = child, at + len(child.ids)
                continue
            shared = _common(child.ids, ids[at:])
            return self._split(child, shared), at + shared
        return node, at

    def _grow(self, parent: _Node, ids: Sequence[int]) -> _Node:
        node = _Node(ids, parent)
        parent.children[ids[0]] = node
        self._nodes[node] = None
        self.tokens += len(ids)
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """Divide a node's ids at `at`; the new node holds those before."""
        assert node.parent is not None
        before = _Node(node.ids[:at], node.parent)
        node.parent.children[before.ids[0]] = before
        node.ids, node.parent = node.ids[at:], before
        before.children[node.ids[0]] = node
        self._nodes[before] = None
        return before

    def _touch(self, node: _Node | None) -> None:
        """From the end to the beginning, so that no node is younger than the one it follows."""
        while node is not None and node.parent is not None:
            self._nodes.move_to_end(node)
            node = node.parent

    def _drop_oldest(self) -> None:
        node, _ = self._nodes.popitem(last=False)
        assert node.parent is not None and not node.children
        del node.parent.children[node.ids[0]]
        self.tokens -= len(node.ids)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
