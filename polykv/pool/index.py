"""A radix index over token ids: which stored tokens a prompt begins with.

The tree of RadixAttention (SGLang, arXiv 2312.07104), but its edges refer to parts of immutable segments instead of owning
memory: an edge is split without touching what is stored, and a match is a list of (segment, tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
T = TypeVar("T")


def as_tokens(token_ids: Sequence[int] | Tokens) -> Tokens:
    """Token ids as an int32 array."""
    return np.asarray(token_ids, dtype=np.int32)


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Tokens that two sequences begin with alike."""
    count = min(len(left), len(right))
    differ = np.flatnonzero(left[:count] != right[:count])
    return int(differ[0]) if len(differ) else count


class Node(Generic[T]):
    """An edge of the tree: ``tokens``, which are those of ``value`` from index ``first`` on.

    Attributes:
        tokens: ids on the edge; at least one.
        value: whose tokens they are.
        first: index of the edge's first token among the value's.
        parent: the edge before, or None below the root.
        children: the edges that follow, by their first token.
    """

    __slots__ = ("children", "first", "parent", "tokens", "value")

    def __init__(self, tokens: Tokens, value: T, first: int, parent: Node[T] | None) -> None:
        self.tokens, self.value, self.first, self.parent = tokens, value, first, parent
        self.children: dict[int, Node[T]] = {}


class RadixIndex(Generic[T]):
    """Token sequences and whose they are. Not thread-safe: the pool's lock guards it.

    Each stored token is in the tree once: what is inserted again under another value stays with the first.
    """

    def __init__(self) -> None:
        self._children: dict[int, Node[T]] = {}
        self._nodes: dict[int, list[Node[T]]] = {}  # by id of the value

    def match(self, tokens: Tokens) -> list[tuple[T, int, int]]:
        """The longest stored beginning.

        Returns:
            ``(value, first, stop)``: the parts of values, in order, whose tokens are those that ``tokens`` begin with;
            adjoining parts of one value are joined.
        """
        found: list[tuple[T, int, int]] = []
        for node, count in self._walk(tokens):
            if found and found[-1][0] is node.value and found[-1][2] == node.first:
                found[-1] = (node.value, found[-1][1], node.first + count)
            else:
                found.append((node.value, node.first, node.first + count))
        return found

    def insert(self, tokens: Tokens, value: T, first: int = 0) -> int:
        """Adds a sequence; what its value holds of it are the last tokens, from index ``first`` of the value on.

        Args:
            tokens: the whole sequence from the root on.
            value: whose tokens the last ones are.
            first: where the value's own tokens begin in ``tokens``; before it the sequence must be stored already.

        Returns:
            Tokens that were added; 0 if all were there already.

        Raises:
            ValueError: the tree does not hold the first ``first`` tokens.
        """
        matched, last = 0, None
        for node, count in self._walk(tokens):
            matched, last = matched + count, (node, count)
        if matched < first:
            raise ValueError(f"the index holds {matched} tokens of a sequence whose first {first} should be there")
        if matched == len(tokens):
            return 0
        parent = None
        if last is not None:
            parent, count = last
            if count < len(parent.tokens):
                self._split(parent, count)
        node = Node(tokens[matched:].copy(), value, matched - first, parent)  # not a view of the whole prompt
        self._siblings(parent)[int(tokens[matched])] = node
        self._nodes.setdefault(id(value), []).append(node)
        return len(tokens) - matched

    def remove(self, value: T) -> None:
        """Takes a value's tokens out.

        Raises:
            ValueError: other values' tokens come after them.
        """
        if self.has_followers(value):
            raise ValueError("other sequences continue this one; remove them first")
        for node in self._nodes.pop(id(value), ()):
            parent = node.parent
            if parent is None or parent.value is not value:
                del self._siblings(parent)[int(node.tokens[0])]
                if parent is not None:
                    self._join(parent)

    def has_followers(self, value: T) -> bool:
        """Whether another value's tokens come after this one's."""
        return any(
            child.value is not value for node in self._nodes.get(id(value), ()) for child in node.children.values()
        )

    def leads(self, value: T) -> list[T]:
        """The values whose tokens come before this one's in the tree, the nearest first."""
        found: list[T] = []
        for node in self._nodes.get(id(value), ())[:1]:
            above = node.parent
            while above is not None:
                if above.value is not value and (not found or found[-1] is not above.value):
                    found.append(above.value)
                above = above.parent
        return found

    def nodes(self) -> Iterator[tuple[Node[T], int]]:
        """All edges, each after the one before it, with their depth in tokens."""
        stack = [(node, 0) for node in reversed(list(self._children.values()))]
        while stack:
            node, depth = stack.pop()
            yield node, depth
            stack += [(child, depth + len(node.tokens)) for child in reversed(list(node.children.values()))]

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, value: T) -> bool:
        return id(value) in self._nodes

    def _siblings(self, parent: Node[T] | None) -> dict[int, Node[T]]:
        return self._children if parent is None else parent.children

    def _walk(self, tokens: Tokens) -> Iterator[tuple[Node[T], int]]:
        children, done = self._children, 0
        while done < len(tokens):
            node = children.get(int(tokens[done]))
            if node is None:
                return
            count = common_prefix(node.tokens, tokens[done:])
            yield node, count
            if count < len(node.tokens):
                return
            done, children = done + count, node.children

    def _split(self, node: Node[T], count: int) -> None:
        """Cuts an edge after ``count`` tokens; the second part becomes the only child of the first."""
        rest: Node[T] = Node(node.tokens[count:], node.value, node.first + count, node)
        rest.children, node.children = node.children, {int(node.tokens[count]): rest}
        for child in rest.children.values():
            child.parent = rest
        node.tokens = node.tokens[:count]
        self._nodes[id(node.value)].append(rest)

    def _join(self, node: Node[T]) -> None:
        """Undoes a split that nothing hangs on any more."""
        if len(node.children) != 1:
            return
        (rest,) = node.children.values()
        if rest.value is not node.value:
            return
        node.tokens = np.concatenate([node.tokens, rest.tokens])
        node.children = rest.children
        for child in node.children.values():
            child.parent = node
        self._nodes[id(node.value)].remove(rest)
