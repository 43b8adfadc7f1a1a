"""The choice of what layers recompute, against all combinations."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.plugins.memory.adaptive_recompute.solver import (
    Choice,
    Kind,
    most_at_once,
    smallest,
    solve,
    useful,
)
from ascend_run.plugins.memory.adaptive_recompute.treatment import NOTHING, Treatment

NUMBERS = st.integers(0, 12)
CHOICES = st.lists(st.builds(Choice, st.just(NOTHING), NUMBERS, NUMBERS), min_size=1, max_size=5)
A, B, C, LAYER = (Treatment((part,)) for part in ("a", "b", "c", ""))
KINDS = st.lists(st.builds(Kind, CHOICES.map(tuple), st.integers(1, 3)), min_size=1, max_size=2)


def sums(choices: tuple[Choice, ...]) -> tuple[int, int]:
    return sum(c.cost for c in choices), sum(c.nbytes for c in choices)


@settings(max_examples=150, deadline=None)
@given(kinds=KINDS, budget=st.integers(0, 60))
def test_no_combination_is_cheaper_within_the_budget(kinds: list[Kind], budget: int) -> None:
    layers = [kind.choices for kind in kinds for _ in range(kind.layers)]
    every = [sums(combination) for combination in itertools.product(*layers)]
    assert smallest(kinds) == min(nbytes for _, nbytes in every)

    found = solve(kinds, budget)

    within = [pair for pair in every if pair[1] <= budget]
    if found is None:
        assert within == []
    else:
        assert sums(tuple(itertools.chain(*found))) == min(within)
        assert [len(choices) for choices in found] == [kind.layers for kind in kinds]
        for kind, choices in zip(kinds, found, strict=True):
            assert {*choices} <= {*kind.choices}
            costs = [choice.cost for choice in choices]
            assert costs == sorted(costs, reverse=True)


@settings(max_examples=150, deadline=None)
@given(
    choices=st.lists(CHOICES.map(tuple), min_size=2, max_size=2),
    moments=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=3),
    budget=st.integers(0, 150),
)
def test_the_budget_holds_at_each_moment(
    choices: list[tuple[Choice, ...]], moments: list[tuple[int, int]], budget: int
) -> None:
    """Two chunks of two layers, of which other numbers of forwards wait at each moment."""
    pairs = zip(choices, zip(*moments, strict=True), strict=True)
    kinds = [Kind(own, 2, in_flight) for own, in_flight in pairs]
    layers = [(kind, choice) for kind in kinds for choice in [kind.choices] * kind.layers]
    every = []
    for combination in itertools.product(*(own for _, own in layers)):
        kept = [
            sum(
                kind.in_flight[at] * c.nbytes
                for (kind, _), c in zip(layers, combination, strict=True)
            )
            for at in range(len(moments))
        ]
        every.append((sum(c.cost for c in combination), max(kept)))
    assert smallest(kinds) == min(nbytes for _, nbytes in every)

    found = solve(kinds, budget)

    within = [pair for pair in every if pair[1] <= budget]
    if found is None:
        assert within == []
    else:
        cost = sum(c.cost for own in found for c in own)
        assert (cost, most_at_once(kinds, found)) == min(within)


def test_choices_that_another_one_beats_are_left_out() -> None:
    keeps, less, slower = Choice(NOTHING, 9, 0), Choice(A, 5, 2), Choice(B, 5, 3)
    more = Choice(C, 6, 2)
    assert useful([slower, more, less, keeps]) == (keeps, less)


def test_a_long_model_is_solved_exactly() -> None:
    """80 layers with two thirds of what they would keep: of one choice as many as are needed."""
    kind = Kind((Choice(NOTHING, 900, 0), Choice(A, 500, 30), Choice(LAYER, 100, 100)), 80)
    (found,) = solve([kind], 48_000) or [()]
    assert sums(found) == (60 * 30, 60 * 500 + 20 * 900)
