"""Which storages leave the device and when: by hand, and on a simulated clock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.ops.transfer.swap_plan import (
    Away,
    Link,
    SavedStorage,
    SwapPlan,
    plan_swaps,
    schedule,
)

MODULE = "ascend_run.ops.transfer.swap_plan"


def storage(nbytes: int, saved: int, used: int, **more: Any) -> SavedStorage:
    given = {"settled": saved, "freed": used, **more}
    return SavedStorage(nbytes=nbytes, saved=saved, used=used, **given)


# Three layers of 10 bytes: saved after 0, 1 and 2 s; the loss; used after 6, 8 and 10 s.
TIMES = (0.0, 1.0, 2.0, 6.0, 8.0, 10.0)
LAYERS = (storage(10, 0, 5), storage(10, 1, 4), storage(10, 2, 3))
FAST = Link(to_host=10.0, to_device=5.0)
"""A second to the host, two back."""


def test_no_torch_is_imported() -> None:
    code = f"import sys, {MODULE}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_schedule_is_the_one_computed_by_hand() -> None:
    """The first is in the host's memory when the second is saved, and the second when the third
    is; each comes back in the two seconds before its use."""
    assert schedule(LAYERS, [0], TIMES, FAST) == {0: Away(0, 1, 4)}
    assert schedule(LAYERS, [1, 0], TIMES, FAST) == {0: Away(0, 1, 4), 1: Away(1, 2, 3)}
    # Its copy to the host ends after 3 s, and memory can be freed after 6 s, when it is used.
    assert schedule(LAYERS, [2], TIMES, FAST) is None


def test_what_is_saved_during_a_copy_leaves_after_it() -> None:
    """Two seconds to the host: the second is saved after one, sent after two, there after four."""
    link = Link(to_host=5.0, to_device=1000.0)
    assert schedule(LAYERS, [0, 1], TIMES, link) is None  # released where it would be fetched
    longer = (storage(10, 0, 6), storage(10, 1, 5))
    times = (0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 10.0)
    assert schedule(longer, [0, 1], times, link) == {0: Away(0, 2, 5), 1: Away(2, 3, 4)}


def test_two_are_fetched_as_one_where_the_link_is_slow() -> None:
    """Three seconds back: the first one's would begin after 7 s, at the event before (6 s), but the
    second is waited for until 8 s; so both come in six seconds, begun after 1.9 s."""
    link = Link(to_host=1000.0, to_device=10 / 3)
    assert schedule(LAYERS, [0], TIMES, link) == {0: Away(0, 1, 3)}
    assert schedule(LAYERS, [1], TIMES, link) is None  # it leaves at 2 s, and would come from then
    early = (storage(10, 0, 6), storage(10, 1, 5))
    times = (0.0, 1.0, 1.5, 1.9, 6.0, 8.0, 10.0)
    assert schedule(early, [0, 1], times, link) == {0: Away(0, 1, 3), 1: Away(1, 2, 3)}


def test_as_much_leaves_as_lowers_the_peak() -> None:
    """Without: 10, 20, 30, 30, 20, 10 bytes after each event. With the first one away 10, 10, 20,
    20, 20, 10: the second would leave the peak where it is, since it is back beside the third."""
    for budget in (0, 19, 20, 29):
        found = plan_swaps(LAYERS, TIMES, FAST, budget)
        assert found == SwapPlan(away={0: Away(0, 1, 4)}, bytes_before=30, bytes_at_peak=20)
    assert plan_swaps(LAYERS, TIMES, FAST, 30).away == {}


def test_one_that_brings_another_back_too_early_stays() -> None:
    """With the first one away, 30 bytes are there when the last one is saved. The third one could
    leave, but would have to be fetched together with the first, when the second is still there: 35
    bytes, as much as without."""
    layers = (storage(5, 0, 6), storage(20, 1, 4), storage(5, 2, 7), storage(5, 3, 5))
    times = (0.0, 1.0, 4.0, 7.0, 10.0, 14.0, 18.0, 19.0)
    link = Link(to_host=10.0, to_device=2.0)
    assert schedule(layers, [0, 2], times, link) == {0: Away(0, 1, 4), 2: Away(2, 3, 4)}
    found = plan_swaps(layers, times, link, 0)
    assert found == SwapPlan(away={0: Away(0, 1, 5)}, bytes_before=35, bytes_at_peak=30)


def test_nothing_leaves_below_a_peak_that_stays() -> None:
    """Of two forwards and backwards, the second one keeps 50 bytes whatever the first does."""
    more = storage(50, 6, 7)
    found = plan_swaps([*LAYERS, more], [*TIMES, 11.0, 12.0], FAST, 0)
    assert found == SwapPlan(away={}, bytes_before=50, bytes_at_peak=50)


def test_what_may_not_leave_stays() -> None:
    pinned = (storage(10, 0, 5, movable=False), *LAYERS[1:])
    assert plan_swaps(pinned, TIMES, FAST, 0).away == {}  # the second is back beside the third
    assert plan_swaps(LAYERS, TIMES, Link(to_host=1.0, to_device=1.0), 0).away == {}


def test_a_storage_that_is_saved_again_leaves_after_the_last_time() -> None:
    again = (storage(10, 0, 5, settled=1), *LAYERS[1:])
    assert schedule(again, [0], TIMES, FAST) == {0: Away(1, 2, 4)}


def test_each_forward_and_backward_has_its_own_peak() -> None:
    """Nothing of the first is there when the second begins."""
    second = [
        storage(10, one.saved + 6, one.used + 6)  # its events follow
        for one in LAYERS
    ]
    times = [*TIMES, *(time + 11 for time in TIMES)]
    found = plan_swaps([*LAYERS, *second], times, FAST, 0)
    assert found.away == {0: Away(0, 1, 4), 3: Away(6, 7, 10)}
    assert found.bytes_at_peak == 20


@st.composite
def steps(draw: Any) -> tuple[list[SavedStorage], list[float], Link, int]:
    """Draw a step, a link and a budget. Saves and uses of storages are in any order."""
    count = draw(st.integers(1, 9))
    marks = [index for index in range(count) for _ in range(draw(st.integers(2, 4)))]
    order = draw(st.permutations(marks))
    places: dict[int, list[int]] = {}
    for place, index in enumerate(order):
        places.setdefault(index, []).append(place)
    storages = []
    for index in sorted(places, key=lambda index: places[index][0]):
        at = places[index]
        saves = draw(st.integers(1, len(at) - 1))
        nbytes = draw(st.integers(1, 20))
        more = {"settled": at[saves - 1], "freed": at[-1]}
        storages.append(storage(nbytes, at[0], at[saves], **more))
    gaps = draw(st.lists(st.floats(0, 4), min_size=len(order), max_size=len(order)))
    speed = st.floats(0.5, 50)
    link = Link(to_host=draw(speed), to_device=draw(speed))
    return storages, [*accumulate(gaps)], link, draw(st.integers(0, 60))


def simulated(
    storages: Sequence[SavedStorage], times: Sequence[float], link: Link, plan: SwapPlan
) -> int:
    """Return the most bytes on the device. Fails where a copy would have to be waited for, or a
    storage is used that is not there."""
    copies = plan.copies()
    there: set[int] = set()
    on_host: set[int] = set()
    leaving, coming = set[int](), set[int]()
    left = came = most = 0.0
    for event, now in enumerate(times):
        there |= {i for i, s in enumerate(storages) if s.saved == event}
        used = {i for i, s in enumerate(storages) if event in (s.used, s.freed)}
        if used & coming:
            assert now + 1e-9 >= came  # a wait for all that come takes no time
            there |= coming
            coming = set()
        assert used <= there
        if event in copies:
            if released := {*copies[event].released}:
                assert released == leaving
                assert now + 1e-9 >= left
                there -= released
                on_host |= released
                leaving = set()
            if sent := {*copies[event].sent}:
                assert not leaving
                assert sent <= there
                assert all(storages[index].settled <= event for index in sent)
                leaving, left = sent, now + sum(storages[i].nbytes for i in sent) / link.to_host
            if fetched := {*copies[event].fetched}:
                assert not coming
                assert fetched <= on_host
                coming = fetched
                came = now + sum(storages[i].nbytes for i in fetched) / link.to_device
        most = max(most, sum(storages[index].nbytes for index in there | coming))
        there -= {i for i, s in enumerate(storages) if s.freed == event}
    assert not leaving
    assert not coming
    return int(most)


@settings(max_examples=300, deadline=None)
@given(steps())
def test_nothing_waits_for_a_copy_on_a_simulated_clock(
    step: tuple[list[SavedStorage], list[float], Link, int],
) -> None:
    storages, times, link, budget = step
    plan = plan_swaps(storages, times, link, budget)
    without = SwapPlan(away={}, bytes_before=0, bytes_at_peak=0)
    assert simulated(storages, times, link, plan) == plan.bytes_at_peak
    assert simulated(storages, times, link, without) == plan.bytes_before
    assert plan.bytes_at_peak < plan.bytes_before or not plan.away
    assert plan.bytes_before > budget or not plan.away


def test_a_fast_link_leaves_little_of_a_deep_model() -> None:
    """One storage is used while the next one is fetched."""
    count = 40
    storages = [storage(10, index, 2 * count - 1 - index) for index in range(count)]
    times = [float(event) for event in range(2 * count)]
    plan = plan_swaps(storages, times, Link(to_host=10.0, to_device=10.0), 0)
    assert (plan.bytes_before, plan.bytes_at_peak) == (10 * count, 20)
