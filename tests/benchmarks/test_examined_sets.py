"""Covering sets that can run: what examining refuses takes no other pair's coverage away."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from ascend_run.testing.runtime import Examined
from benchmarks.campaigns.covering import Items, pairs_of
from benchmarks.campaigns.examined_sets import examined_sets

ITEMS = [*"abcdefgh"]
ALL = {frozenset(pair) for pair in combinations(ITEMS, 2)}


def refusing(*causes: str) -> Callable[[Items], Examined]:
    def examine(names: Items) -> Examined:
        return Examined([f"no {cause}" for cause in causes if {*cause} <= names])

    return examine


def test_without_conflicts_one_set_holds_everything() -> None:
    found = examined_sets(ITEMS, [], refusing())
    assert found.sets == (tuple(ITEMS),)
    assert (found.refused, found.apart) == ({}, frozenset())


@pytest.mark.parametrize("causes", [("ab",), ("ab", "cd"), ("a",), ("abc",), ("ah", "bcd", "e")])
def test_a_refused_set_is_traced_to_what_is_refused(causes: tuple[str, ...]) -> None:
    found = examined_sets(ITEMS, [], refusing(*causes))
    assert found.refused == {frozenset(cause): f"no {cause}" for cause in causes}
    refused = {pair for pair in ALL for cause in causes if {*cause} <= pair}
    impossible = refused | {
        pair for pair in ALL for cause in causes if len(cause) == 1 and {*cause} & pair
    }
    assert pairs_of(found.sets) == ALL - impossible
    assert not any({*cause} <= {*names} for cause in causes for names in found.sets)


def test_items_that_make_another_one_idle_are_a_set_of_their_own() -> None:
    def examine(names: Items) -> Examined:
        idle = {"b"} if {"a", "b"} <= names else set()
        idle |= {"beside"} if "c" in names else set()  # not of the set
        return Examined((), frozenset(idle | ({"h"} & names)))  # h has nothing to do anywhere

    found = examined_sets(ITEMS, [], examine)
    assert found.apart == {frozenset("ab")}
    assert [names for names in found.sets if {"a", "b"} <= {*names}] == [("a", "b")]
    assert pairs_of(found.sets) == ALL


def test_the_first_items_also_have_a_set_without_others() -> None:
    found = examined_sets(ITEMS, [frozenset("cd")], refusing(), first=[["b", "c", "d"]])
    assert {("b", "c"), ("b", "d")} <= {*found.sets}
    assert pairs_of(found.sets) == ALL - {frozenset("cd")}


def test_sets_of_the_first_items_stay_as_they_are_without_the_others() -> None:
    older = ["b", "c", "d"]
    alone = examined_sets(older, [frozenset("cd")], refusing())
    found = examined_sets(ITEMS, [frozenset("cd")], refusing(), first=[["b", "c"], older])
    of_both = examined_sets(older, [frozenset("cd")], refusing(), first=[["b", "c"]])
    assert {*alone.sets} == {*of_both.sets} <= {*found.sets}
    assert pairs_of(found.sets) == ALL - {frozenset("cd")}


def test_needs_are_in_every_set_and_in_what_is_examined() -> None:
    def examine(names: Items) -> Examined:
        return Examined(["a needs b"] if "a" in names and "b" not in names else [])

    found = examined_sets(ITEMS, [frozenset("bc")], examine, needs={"a": frozenset("b")})
    assert found.refused == {}
    assert pairs_of(found.sets) == ALL - {frozenset("bc"), frozenset("ac")}


def test_a_hint_that_is_no_conflict_here_is_ignored() -> None:
    found = examined_sets(ITEMS, [], refusing("ab"), hints=[frozenset("ab"), frozenset("cd")])
    assert found.refused.keys() == {frozenset("ab")}
