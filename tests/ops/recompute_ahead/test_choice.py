"""The order of an interleaved schedule against Megatron's, and what is kept in it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.ops.recompute_ahead.choice import Choice, each_before_its_backward, within
from ascend_run.ops.recompute_ahead.order import ScheduleOrder
from ascend_run.testing.pool import GlooPool


@st.composite
def orders(draw: Any, most: int = 40) -> ScheduleOrder:
    """Draw a schedule that Megatron accepts, of at most ``most`` forwards."""
    pipeline, chunks = draw(st.integers(2, 4)), draw(st.integers(2, 3))
    group = draw(st.integers(pipeline, pipeline + 1))
    counts = [n for n in range(group, most // chunks + 1) if n % group in (0, *range(pipeline, n))]
    count = draw(st.sampled_from(counts or [group]))
    return ScheduleOrder(pipeline, draw(st.integers(0, pipeline - 1)), chunks, group, count)


GRID = [
    ScheduleOrder(pipeline, rank, chunks, pipeline + more, count)
    for pipeline, chunks, more in itertools.product((2, 4), (2, 3), (0, 1))
    for rank in range(pipeline)
    for count in (pipeline + more, 3 * (pipeline + more), 2 * pipeline + more)
]


def orders_of_megatron(grid: list[ScheduleOrder]) -> list[tuple[Any, ...]]:
    """Return (chunk, micro-batch) of each forward, and the number of the warm-up. A rank's job."""
    from megatron.core.pipeline_parallel import schedules

    found = []
    for order in grid:
        group = SimpleNamespace(size=lambda o=order: o.pipeline, rank=lambda o=order: o.rank)
        p2p = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=order.chunks)
        sizes = order.microbatches, order.chunks, order.group
        table = schedules.get_schedule_table(*sizes)
        _, _, warm_up, _ = schedules.get_pp_rank_microbatches(*sizes, p2p_communicator=p2p)
        found.append((tuple((chunk, number) for number, chunk in table), warm_up))
    return found


def test_the_order_is_that_of_megatron(gloo_pool: GlooPool) -> None:
    (found,) = gloo_pool.run(orders_of_megatron, 1, GRID)
    assert found == [(order.forwards, order.warm_up) for order in GRID]


@given(orders())
def test_backwards_are_the_forwards_with_the_last_chunk_first(order: ScheduleOrder) -> None:
    last = order.chunks - 1
    assert [(last - chunk, number) for chunk, number in order.backwards] == [*order.forwards]
    assert [order.backwards[end] for end in order.ends] == [*order.forwards]


def most_at_once(order: ScheduleOrder, choice: Choice) -> int:
    """Return how many forwards have their activations at the same time, in a step that does what is
    due and recomputes the rest in backward."""
    has: set[int] = set()
    began, most = 0, 0

    def add(forward: int) -> None:
        nonlocal most
        assert forward < began, "recomputed before it has run"
        assert forward not in has, "recomputed, though its activations exist"
        has.add(forward)
        most = max(most, len(has))

    for step in range(-order.warm_up, len(order.backwards)):
        if began < len(order.forwards):
            began += 1
            if began - 1 in choice.kept:
                add(began - 1)
        if step < 0:
            continue
        for forward in choice.due[step]:
            assert order.waits(step)
            add(forward)
        own = order.ends.index(step)
        if own not in has:
            add(own)
        has.remove(own)
    return most


@given(orders())
def test_each_forward_is_recomputed_where_its_gradient_is_waited_for(order: ScheduleOrder) -> None:
    choice = each_before_its_backward(order)
    assert most_at_once(order, choice) == 1
    own = [step for step, forwards in enumerate(choice.due) if forwards]
    assert own == [step for step in range(len(order.backwards)) if order.waits(step)]


@given(orders(), st.integers(1, 14))
def test_no_more_forwards_than_the_limit_have_activations(order: ScheduleOrder, limit: int) -> None:
    choice = within(limit, order)
    assert most_at_once(order, choice) <= limit
    assert all(len(forwards) <= 1 for forwards in choice.due)
    assert not choice.kept & {*itertools.chain(*choice.due)}


@given(orders(most=10), st.integers(1, 6))
def test_no_choice_keeps_more_forwards(order: ScheduleOrder, limit: int) -> None:
    count, nothing = len(order.forwards), ((),) * len(order.backwards)
    kept = len(within(limit, order).kept)
    for larger in itertools.combinations(range(count), kept + 1):
        assert most_at_once(order, Choice(frozenset(larger), nothing)) > limit


@pytest.mark.parametrize(
    ("rank", "count", "dropped", "due"),
    [
        (0, 8, [8, 9, 10], {6: 8, 7: 9, 8: 10}),
        (1, 8, [8], {8: 8}),
        (2, 8, [], {}),
        (0, 4, [], {}),
    ],
)
def test_by_hand_for_four_ranks_of_two_chunks(
    rank: int, count: int, dropped: list[int], due: dict[int, int]
) -> None:
    """Rank 0 would have 11 forwards in flight, of which 8 are kept. Those of the first chunk's
    second group have the last backwards."""
    order = ScheduleOrder(4, rank, 2, 4, count)
    choice = within(8, order)
    assert sorted({*range(len(order.forwards))} - choice.kept) == dropped
    assert {step: forward for step, found in enumerate(choice.due) for forward in found} == due
