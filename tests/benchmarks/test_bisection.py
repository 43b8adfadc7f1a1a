"""Delta debugging: the smallest failing subset, in few tests."""

from __future__ import annotations

import pytest

from benchmarks.campaigns.bisection import smallest

NAMES = tuple("abcdefghijklmnop")


@pytest.mark.parametrize("culprits", ["a", "k", "p", "ab", "ap", "gh", "bgo"])
def test_the_culprits_are_found(culprits: str) -> None:
    tested: list[tuple[str, ...]] = []

    def fails(subset: tuple[str, ...]) -> bool:
        tested.append(subset)
        return {*culprits} <= {*subset}

    assert smallest(NAMES, fails) == tuple(culprits)
    assert len(tested) == len({*tested}) <= 16 * len(culprits)


def test_a_single_culprit_takes_about_two_tests_per_halving() -> None:
    tested: list[tuple[str, ...]] = []

    def fails(subset: tuple[str, ...]) -> bool:
        tested.append(subset)
        return "p" in subset

    assert smallest(NAMES, fails) == ("p",)
    assert len(tested) <= 8


def test_a_set_that_fails_only_as_a_whole_stays() -> None:
    assert smallest(NAMES, lambda subset: subset == NAMES) == NAMES


def test_one_of_several_minimal_subsets_is_returned() -> None:
    found = smallest(NAMES, lambda subset: {*"cd"} <= {*subset} or "m" in subset)
    assert found in (("c", "d"), ("m",))
