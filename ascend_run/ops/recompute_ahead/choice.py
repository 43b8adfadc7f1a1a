"""Which forwards of a step keep their activations, and when the others are recomputed. No torch."""

from __future__ import annotations

import attrs

from .order import ScheduleOrder


@attrs.frozen
class Choice:
    """What a rank does in one step. Forwards and backwards are numbered as in ``ScheduleOrder``."""

    kept: frozenset[int]
    """Forwards that keep everything that they save for backward; the others keep their inputs."""
    due: tuple[tuple[int, ...], ...]
    """Backward -> forwards that are recomputed before its gradient is waited for. What is not due
    before its backward is recomputed by it."""


def each_before_its_backward(order: ScheduleOrder) -> Choice:
    """Keep no forward, and recompute each one while its gradient is waited for."""
    due: list[tuple[int, ...]] = [()] * len(order.backwards)
    for forward, backward in enumerate(order.ends):
        if order.waits(backward):
            due[backward] = (forward,)
    return Choice(frozenset(), tuple(due))


def within(limit: int, order: ScheduleOrder) -> Choice:
    """Keep as many forwards as possible, and recompute one of the others at each wait, as soon as
    it can stay until its backward.

    Args:
        limit: Forwards that may have their activations at once, those recomputed included.
    """
    kept = _most_kept(limit, order)
    # Every step has the activations of its own backward, kept or recomputed; beside them:
    beside = [0] * len(order.backwards)
    for forward in kept:
        for step in range(order.begin(forward), order.ends[forward]):
            beside[step] += 1
    waiting = sorted({*range(len(order.forwards))} - kept, key=lambda n: order.ends[n])
    due: list[tuple[int, ...]] = [()] * len(order.backwards)
    for step in range(len(order.backwards)):
        waiting = [forward for forward in waiting if order.ends[forward] >= step]
        if not waiting or not order.waits(step):
            continue
        first = waiting[0]
        until = range(step, order.ends[first])
        if order.begin(first) <= step and all(beside[n] < limit - 1 for n in until):
            due[step] = (waiting.pop(0),)
            for n in until:
                beside[n] += 1
    return Choice(frozenset(kept), tuple(due))


def _most_kept(limit: int, order: ScheduleOrder) -> set[int]:
    """Return the most forwards that can be kept. Whenever there are too many, the one whose
    backward comes last is not kept, which is optimal for intervals."""
    kept: set[int] = set()
    held: list[int] = []
    for forward, end in enumerate(order.ends):
        held = [other for other in held if order.ends[other] > order.begin(forward)]
        kept.add(forward)
        if end > order.begin(forward):
            held.append(forward)
        if len(held) > limit - 1:
            dropped = max(held, key=lambda other: order.ends[other])
            held.remove(dropped)
            kept.remove(dropped)
    return kept
