"""Replicated experts: the choice by counts, and on ranks their results, order and volume."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.ops.experts.hot_experts import hot_experts
from ascend_run.testing.pool import GlooPool

from . import hot_jobs as jobs
from .dispatcher_jobs import F, H, X

ITEM = 8
ROUTINGS = ("spread", "first", "last empty", "dropped")


def rows_of(counts: list[list[int]], hot: set[int]) -> list[int]:
    """Return the rows of each rank, counted one by one."""
    local = len(counts[0]) // len(counts)
    rows = [0] * len(counts)
    for source, of_source in enumerate(counts):
        for expert, number in enumerate(of_source):
            rows[source if expert in hot else expert // local] += number
    return rows


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_choices_are_largest_experts_of_the_fullest_ranks(
    data: st.DataObject, num_ranks: int, local: int
) -> None:
    """Few different counts, so that ties are frequent."""
    row = st.lists(st.integers(0, 3), min_size=num_ranks * local, max_size=num_ranks * local)
    counts = data.draw(st.lists(row, min_size=num_ranks, max_size=num_ranks))
    hot, best = set[int](), set[int]()
    for number in range(1, local + 1):
        rows = rows_of(counts, hot)
        owner = min(range(num_ranks), key=lambda rank: (-rows[rank], rank))
        held = set(range(owner * local, (owner + 1) * local)) - hot
        hot.add(min(held, key=lambda expert: (-sum(row[expert] for row in counts), expert)))
        if max(rows_of(counts, hot)) < max(rows_of(counts, best)):
            best = set(hot)
        found = hot_experts(torch.tensor(counts), number)
        assert found.experts == tuple(sorted(best))
        assert list(found.rows_before) == rows_of(counts, set())
        assert list(found.rows_after) == rows_of(counts, best)


def test_all_tokens_on_one_expert_are_computed_where_they_are() -> None:
    counts = torch.tensor([[0, 0, 7, 0], [0, 0, 9, 0]])
    found = hot_experts(counts, 1)
    assert (found.experts, found.rows_before, found.rows_after) == ((2,), (0, 16), (7, 9))


def test_equal_ranks_and_experts_are_taken_in_order() -> None:
    counts = torch.tensor([[3, 3, 1, 1, 0, 0], [0, 0, 1, 1, 3, 3], [3, 3, 1, 1, 1, 1]])
    assert hot_experts(counts, 1).experts == (0,)


def test_no_replica_is_made_that_does_not_help() -> None:
    """The rows of an expert would only move to another rank, which then had more."""
    found = hot_experts(torch.tensor([[0, 0, 3, 3], [3, 4, 0, 0]]), 2)
    assert found.experts == ()
    assert found.rows_after == found.rows_before == (7, 6)


def test_two_full_ranks_both_get_replicas() -> None:
    """The first replica alone does not lower the fullest rank; both do."""
    counts = torch.tensor([[4, 0, 4, 0, 0, 0, 0, 0]] * 4)
    assert hot_experts(counts, 1).experts == ()
    assert hot_experts(counts, 2).experts == (0, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("overlap", "shared"), [(False, False), (True, True)], ids=str)
@pytest.mark.parametrize("ep", [2, 4])
def test_output_and_every_gradient_are_those_of_each_token(
    gloo_pool: GlooPool, ep: int, overlap: bool, shared: bool
) -> None:
    """Of inputs, probabilities and experts; with all tokens on one expert, empty experts, and
    tokens dropped. The rows of each rank are those of the choice, which is that of the counts on
    every rank."""
    runs = [*product(ROUTINGS, (1, 2), range(1, X // ep + 1))]
    ranks = gloo_pool.run(jobs.outcomes, ep, ep, runs, overlap=overlap, shared=shared)
    for at, (kind, topk, num_hot) in enumerate(runs):
        counts = jobs.counts_of(ep, kind, topk)
        expected = hot_experts(torch.tensor(counts), num_hot)
        for rank, found in enumerate(outcomes[at] for outcomes in ranks):
            assert max(found.errors.values()) <= 1e-10, (kind, topk, num_hot, found.errors)
            assert found.choice == expected
            assert found.counts == counts
            assert sum(found.computed) == expected.rows_after[rank]
    for routing in ("first", "dropped"):
        mine = [at for at, (kind, *_) in enumerate(runs) if kind == routing]
        assert any(sum(outcomes[at].computed[1:]) for outcomes in ranks for at in mine), routing


@pytest.mark.parametrize("ep", [2, 4])
def test_communication_volume_equals_its_formula(gloo_pool: GlooPool, ep: int) -> None:
    """A rank sends the rows that it does not keep, and the weights of each hot expert are broadcast
    and their gradients reduced, once each."""
    runs, local = [("spread", 2, X // ep), ("first", 1, X // ep)], X // ep
    for rank, outcomes in enumerate(gloo_pool.run(jobs.outcomes, ep, ep, runs)):
        for (kind, topk, _), found in zip(runs, outcomes, strict=True):
            num_hot = len(found.choice.experts)
            assert num_hot
            moving = [  # source, owner of the expert, rows
                (source, expert // local, rows)
                for source, counts in enumerate(jobs.counts_of(ep, kind, topk))
                for expert, rows in enumerate(counts)
                if source == expert // local or expert not in found.choice.experts
            ]
            sent = sum(rows for source, _, rows in moving if source == rank)
            received = sum(rows for _, owner, rows in moving if owner == rank)
            row, out = (H + 1) * ITEM, H * ITEM
            there, back = sent * row + received * out, received * row
            replicas = num_hot * 2 * H * F * ITEM
            assert found.sent_bytes == {
                "_allgather_base_": X * ITEM,
                "alltoall_base_": there + back + sent * out,
                "broadcast_": replicas,
                "reduce_": replicas,
            }
            assert found.calls["broadcast_"] == found.calls["reduce_"] == 2 * num_hot


def test_without_a_replica_no_row_is_copied_once_more(gloo_pool: GlooPool) -> None:
    """All tokens have all experts, so that the ranks are balanced."""
    for plain, found in gloo_pool.run(jobs.copying, 2, 2, "first", X, 1):
        assert found == plain
        assert found["cat"] or found["index"] or found["index_select"]


def test_replicas_arrive_and_are_reduced_behind_own_experts(gloo_pool: GlooPool) -> None:
    for (found,) in gloo_pool.run(jobs.outcomes, 2, 2, [("first", 1, 1)]):
        forward = ["broadcast", "own", "wait", "replicas"]
        assert found.log == [*forward, "dreplicas", "reduce", "down", "wait"]
