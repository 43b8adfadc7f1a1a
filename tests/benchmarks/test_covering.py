"""Covering arrays: every possible pair in a set, no impossible set, and few of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.campaigns.covering import Items, covering_sets, pairs_of


def named(count: int) -> list[str]:
    return [f"item-{index:03}" for index in range(count)]


def possible(names: Collection[str], refused: Collection[Items]) -> bool:
    return not any(known <= {*names} for known in refused)


@st.composite
def conflict_graphs(draw: st.DrawFn) -> tuple[list[str], list[Items], dict[str, Items]]:
    """Items; refused sets of one to three of them; and needs of some."""
    items = named(draw(st.integers(0, 12)))
    chosen = st.frozensets(st.sampled_from(items or ["none"]), min_size=1, max_size=3)
    refused = draw(st.lists(chosen, max_size=14)) if items else []
    needed = draw(st.dictionaries(st.sampled_from(items[6:]), st.sampled_from(items[:6]))) if (
        len(items) > 6
    ) else {}  # fmt: skip
    return items, refused, {item: frozenset({other}) for item, other in needed.items()}


@given(conflict_graphs())
def test_every_possible_pair_is_in_a_possible_set(
    graph: tuple[list[str], list[Items], dict[str, Items]],
) -> None:
    items, refused, needs = graph
    sets = covering_sets(items, refused, needs=needs)

    def closed(names: Collection[str]) -> set[str]:
        return {*names}.union(*(needs.get(name, frozenset()) for name in names))

    assert all(possible(found, refused) and closed(found) == {*found} for found in sets)
    wanted = {frozenset(pair) for pair in combinations(items, 2) if possible(closed(pair), refused)}
    assert wanted <= pairs_of(sets)
    alone = {item for item in items if possible(closed({item}), refused)}
    assert alone == {item for found in sets for item in found}
    assert sets == covering_sets(items, refused, needs=needs)


def exclusive(groups: Sequence[Sequence[str]]) -> list[Items]:
    return [frozenset(pair) for group in groups for pair in combinations(group, 2)]


@pytest.mark.parametrize("count", [50, 100, 200])
def test_the_number_of_sets_depends_on_the_exclusive_groups(count: int) -> None:
    """Eight, four, three and two implementations of a hook, and scattered conflicts."""
    items = named(count)
    groups = [items[0:8], items[8:12], items[12:15], items[15:17]]
    scattered = [frozenset({items[i], items[(7 * i + 21) % count]}) for i in range(20, count, 5)]
    refused = exclusive(groups) + scattered
    sets = covering_sets(items, refused)

    assert 8 * 4 <= len(sets) <= 36
    wanted = {frozenset(pair) for pair in combinations(items, 2)} - {*refused}
    assert wanted == pairs_of(sets)


def test_pairs_of_existing_sets_are_not_covered_again() -> None:
    items = named(4)
    refused = exclusive([items[2:]])
    assert covering_sets(items, refused, covered=[items[:3]]) == [
        (items[0], items[1], items[3]),
    ]


def test_an_item_that_excludes_all_others_is_a_set() -> None:
    items = named(3)
    refused = [frozenset({items[0], other}) for other in items[1:]]
    assert covering_sets(items, refused) == [(items[1], items[2]), (items[0],)]
