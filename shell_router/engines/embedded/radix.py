"""The prefix cache: radix trees over token ids whose nodes hold the KV itself.

SGLang keeps indices into a paged pool instead; here a node owns its tensor, because on a CPU gathering a prefix is one
cheap concatenation and no attention kernel reads pages. Kept: longest-prefix match, splitting, pins against eviction,
and least-recently-used eviction by leaves under a token budget.

What one adapter computed is of no use to another, nor to the model alone: each `owner` of KV has a tree of its own
(SGLang's extra key), and all share the budget.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shell_router.engines.embedded.radix_nodes import Node, TokenIds, nodes_of, sequences_of, upwards, walk

SHORT_LEAF_TOKENS = 128
NO_ADAPTER = 0
"""The owner of what the model computes without an adapter; others are adapters' numbers."""


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix of `length` tokens; `node` is the deepest one touched, and what to pin."""

    length: int
    node: Node
    pieces: tuple[Tensor, ...]

    def copy_into(self, kv: Tensor) -> None:
        """Write the prefix's KV to the first `length` positions of `kv`."""
        start = 0
        for piece in self.pieces:
            kv[:, :, :, start : start + piece.shape[3]] = piece
            start += piece.shape[3]


class RadixCache:
    """Longest cached prefixes of token sequences, at most `capacity_tokens` of them. Not thread-safe.

    A leaf shorter than `short_leaf_tokens` is extended in place: a prompt that grows by a few tokens at a time would
    else become a chain of as many nodes, and every match would walk it.
    """

    def __init__(self, capacity_tokens: int, *, short_leaf_tokens: int = SHORT_LEAF_TOKENS) -> None:
        self.capacity_tokens = capacity_tokens
        self.short_leaf_tokens = short_leaf_tokens
        self.tokens = 0
        self.evicted_tokens = 0
        self._roots: dict[int, Node] = {}
        self._tick = itertools.count(1)

    def match(self, tokens: Sequence[int], owner: int = NO_ADAPTER) -> Match:
        """The longest prefix of `tokens` that `owner` has cached, which counts as its use."""
        wanted = np.asarray(tokens, np.int64)
        root = self._root(owner)
        node, length, pieces, now = root, 0, [], next(self._tick)
        for child, shared in walk(root, wanted):
            child.last_used = now
            pieces.append(child.kv[:, :, :, :shared])
            node, length = child, length + shared
        return Match(length, node, tuple(pieces))

    def pin(self, node: Node) -> None:
        """Keep `node` and all above it from eviction until `unpin`."""
        for each in upwards(node):
            each.pins += 1

    def unpin(self, node: Node) -> None:
        """Undo one `pin` of `node`."""
        for each in upwards(node):
            each.pins -= 1

    def insert(self, tokens: Sequence[int], kv: Tensor, owner: int = NO_ADAPTER) -> int:
        """Keep a copy of `owner`'s `kv` (`[layers, 2, kv_heads, >= len(tokens), head_dim]`) for what is not cached yet.

        Evicts to make room; where pins leave too little, only a leading part is kept. Returns tokens newly kept.
        """
        wanted = np.asarray(tokens, np.int64)
        node, start = self._attach_point(self._root(owner), wanted)
        self.pin(node)
        self._evict(self.tokens + len(wanted) - start - self.capacity_tokens)
        self.unpin(node)
        stop = min(len(wanted), start + self.capacity_tokens - self.tokens)
        if stop > start:
            self._append(node, wanted[start:stop], kv[:, :, :, start:stop])
        return max(stop - start, 0)

    def clear(self) -> None:
        """Forget everything that is not pinned."""
        self._evict(self.tokens)

    def forget(self, owner: int) -> None:
        """Forget all that `owner` computed. It must pin nothing any more, and compute nothing ever again."""
        root = self._roots.pop(owner, None)
        if root is not None:
            self.tokens -= sum(len(node.tokens) for node in nodes_of(root))

    def sequences(self, owner: int = NO_ADAPTER) -> Iterator[tuple[int, ...]]:
        """Every cached root-to-leaf sequence of `owner`; for inspection."""
        yield from sequences_of(self._root(owner))

    def _root(self, owner: int) -> Node:
        if owner not in self._roots:
            self._roots[owner] = Node(np.empty(0, np.int64), torch.empty(0), None)
        return self._roots[owner]

    def _attach_point(self, root: Node, wanted: TokenIds) -> tuple[Node, int]:
        node, start = root, 0
        for child, shared in walk(root, wanted):
            node = child if shared == len(child.tokens) else self._split(child, shared)
            start += shared
        return node, start

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` in two and return the upper part; whoever pinned it pins both."""
        assert node.parent is not None
        # Copies, not views: a view would keep the whole storage alive after the other half is evicted.
        upper = Node(node.tokens[:at], node.kv[:, :, :, :at].clone(), node.parent, node.last_used, node.pins)
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.kv, node.parent = node.tokens[at:], node.kv[:, :, :, at:].clone(), upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _append(self, node: Node, tokens: TokenIds, kv: Tensor) -> None:
        self.tokens += len(tokens)
        if node.parent is not None and not node.children and len(node.tokens) < self.short_leaf_tokens:
            node.tokens, node.kv = np.concatenate((node.tokens, tokens)), torch.cat((node.kv, kv), dim=3)
            node.last_used = next(self._tick)
        else:
            node.children[int(tokens[0])] = Node(tokens, kv.clone(), node, next(self._tick))

    def _evict(self, wanted_tokens: int) -> None:
        if wanted_tokens <= 0:
            return
        nodes = itertools.chain.from_iterable(map(nodes_of, self._roots.values()))
        leaves = [(node.last_used, id(node), node) for node in nodes if node.parent is not None and not node.children]
        heapq.heapify(leaves)
        while leaves and wanted_tokens > 0:
            leaf = heapq.heappop(leaves)[2]
            if leaf.pins:
                continue
            wanted_tokens -= len(leaf.tokens)
            parent = self._remove(leaf)
            if parent.parent is not None and not parent.children:
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))

    def _remove(self, leaf: Node) -> Node:
        assert leaf.parent is not None
        del leaf.parent.children[int(leaf.tokens[0])]
        self.tokens -= len(leaf.tokens)
        self.evicted_tokens += len(leaf.tokens)
        return leaf.parent
