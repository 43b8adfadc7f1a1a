"""Rows of ids that begin alike, as trees: what several rows share is there once.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import attrs

_LEAST_SHARED: Final = 16
"""Tokens, or rows have trees of their own."""
PAGE: Final = 16
"""Tokens of a page of the cache."""


@attrs.frozen(kw_only=True, eq=False)
class Row:
    """Ids of which the last ones are to be scored, each after all that precede it."""

    ids: Sequence[int]  #: At least two.
    num_scored: int  #: At most all but the first.

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads: all but the last."""
        return len(self.ids) - 1

    @property
    def first(self) -> int:
        """Position of the first input whose logits score an id."""
        return self.num_inputs - self.num_scored


@attrs.define(eq=False)
class Node:
    """Inputs that follow those of another node, of all rows that begin with both."""

    start: int
    end: int
    parent: Node | None = None
    children: list[Node] = attrs.field(factory=list)
    rows: list[tuple[int, Row]] = attrs.field(factory=list)
    """Those rows, with their numbers; none ends before the node does."""

    @property
    def ids(self) -> Sequence[int]:
        """The inputs."""
        return self.rows[0][1].ids[self.start : self.end]

    @property
    def num_logits(self) -> int:
        """Last inputs among which all are that score an id."""
        first = min(row.first for _, row in self.rows)
        return self.end - max(self.start, min(first, self.end))

    @property
    def num_pages(self) -> int:
        """Pages that no node before it has."""
        return -(-self.end // PAGE) - self.start // PAGE

    def split(self, at: int) -> None:
        """Let the inputs from a position on be a child, which has the children."""
        child = Node(at, self.end, self, self.children, [*self.rows])
        for one in child.children:
            one.parent = child
        self.end, self.children = at, [child]


@attrs.define(eq=False)
class Tree:
    """Rows that begin with the inputs of a root."""

    root: Node
    num_pages: int
    """Of all nodes."""

    @classmethod
    def of(cls, number: int, row: Row) -> Tree:
        """Return the tree of one row."""
        root = Node(0, row.num_inputs, rows=[(number, row)])
        return cls(root, root.num_pages)

    def add(self, number: int, row: Row) -> None:
        """Add a row, which begins as others do."""
        node = self.root
        while True:
            shared = node.start + _num_shared(node.ids, row.ids[node.start : row.num_inputs])
            if shared < node.end:
                self.num_pages -= node.num_pages
                node.split(shared)
                self.num_pages += node.num_pages + node.children[0].num_pages
            node.rows.append((number, row))
            if shared == row.num_inputs:
                return
            following = row.ids[shared]
            found = (one for one in node.children if one.ids[0] == following)
            child = next(found, None)
            if child is None:
                child = Node(shared, row.num_inputs, node, rows=[(number, row)])
                node.children.append(child)
                self.num_pages += child.num_pages
                return
            node = child


def trees(rows: Iterable[Row], most_pages: int, *, share: bool = True) -> Iterator[Tree]:
    """Yield trees of rows that follow each other, numbered from 0.

    Args:
        most_pages: Of a tree of several rows.
        share: Whether rows may share inputs.
    """
    tree: Tree | None = None
    for number, row in enumerate(rows):
        if tree is not None and share and tree.num_pages <= most_pages and _begins(tree, row):
            tree.add(number, row)
            continue
        if tree is not None:
            yield tree
        tree = Tree.of(number, row)
    if tree is not None:
        yield tree


def _begins(tree: Tree, row: Row) -> bool:
    shared = _num_shared(tree.root.ids, row.ids[: row.num_inputs])
    return shared >= min(_LEAST_SHARED, row.num_inputs, tree.root.end)


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many of the first ids are equal."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if [*a[low:middle]] == [*b[low:middle]]:
            low = middle
        else:
            high = middle - 1
    return low
