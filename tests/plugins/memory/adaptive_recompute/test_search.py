"""The search for the budget that memory has room for, against a limit that it does not know."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.plugins.memory.adaptive_recompute.search import Search

LEAST, MOST, ANY = 1_000, 33_000, 1 << 62


def searched(limit: int, first: int, search: Search | None = None) -> tuple[Search, int, int]:
    """Search until it is settled; return it, the failures and the steps that ran."""
    search, failures, steps = search or Search(LEAST, first, most=ANY), 1, 0
    budget: int | None = search.failed(first)
    while budget is not None:
        if budget > limit:
            failures += 1
            budget = search.failed(budget)
        else:
            steps += 1
            budget = search.ran()
    return search, failures, steps


@settings(max_examples=200, deadline=None)
@given(limit=st.integers(LEAST, MOST - 1))
def test_it_ends_just_below_the_limit_and_soon(limit: int) -> None:
    search, failures, steps = searched(limit, MOST)
    assert search.budget <= limit
    assert limit - search.budget <= (MOST - LEAST) // 32
    assert failures <= 6
    assert steps <= 6


def test_what_had_room_once_is_given_up_where_it_no_longer_has() -> None:
    search, _, _ = searched(30_000, MOST)
    before = search.budget
    assert search.is_settled
    assert 15_000 < before <= 30_000
    budget = search.failed(before)
    assert LEAST < budget < before
    assert search.ran() is None  # it is not raised again
    assert search.failed(budget) < budget


def test_the_least_is_tried_where_less_than_that_was_kept() -> None:
    search = Search(LEAST, LEAST, most=ANY)
    assert search.failed(10) == LEAST
    assert search.ran() is None


@settings(deadline=None)
@given(most=st.integers(LEAST // 2, MOST), limit=st.integers(LEAST, MOST - 1))
def test_no_budget_is_above_the_most(most: int, limit: int) -> None:
    """Which it settles at if there is room; it may be less than the least that is kept."""
    search = Search(LEAST, MOST, most=most)
    budget: int | None = search.failed(MOST)
    budgets = []
    while budget is not None:
        budgets.append(budget)
        budget = search.failed(budget) if budget > limit else search.ran()
    assert max(budgets) <= most
    assert min(most, limit) - search.budget <= (MOST - LEAST) // 32
