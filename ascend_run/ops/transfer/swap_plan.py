"""Choose which saved storages leave the device, and when they leave and come back. No torch.

A step is a list of events with their times: at each, a storage is saved for backward or used by it.
What happens to storages happens at events. One lane copies to the host and another one back; each
has one batch in flight, since a wait is for all copies of a lane:

- A storage can be sent from its last save on. What is saved while a batch is in flight leaves with
  the next one. A batch is released, that is its memory on the device is freed, at the first event
  at which it has arrived.
- A batch is fetched at the latest event from which it arrives before its first use, and not before
  the first use of the batch before. If there is none, both are fetched as one.

So the computation waits for no copy that takes as long as the link says.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

import attrs


@attrs.frozen(kw_only=True)
class SavedStorage:
    """One storage, with the indices of its events."""

    nbytes: int
    saved: int  #: Saved first: it is on the device from here on.
    settled: int  #: Saved last: it can be copied from here on.
    used: int  #: Used first.
    freed: int  #: Used last: it is freed with the next event.
    movable: bool = True  #: Whether it may leave.


@attrs.frozen(kw_only=True)
class Link:
    """Speed of copies between the device and the host. Unit: bytes per second."""

    to_host: float
    to_device: float


@attrs.frozen
class Away:
    """The events between which a storage is not on the device."""

    sent: int  #: Its copy to the host starts.
    released: int  #: Its memory is freed.
    fetched: int  #: Memory is allocated for it, and its copy back starts.


@attrs.frozen(kw_only=True)
class Copies:
    """What starts or ends at one event, by the indices of storages."""

    released: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    fetched: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class SwapPlan:
    """What leaves the device in a step."""

    away: Mapping[int, Away]  #: Index of a storage -> when it is away.
    bytes_before: int  #: Saved bytes on the device at the peak, if nothing leaves.
    bytes_at_peak: int  #: With the plan.

    def copies(self) -> dict[int, Copies]:
        """Return event -> what starts or ends there; the order of a lane is that of its uses."""
        found: dict[int, Copies] = {}
        for what in ("released", "sent", "fetched"):
            event_of = attrgetter(what)
            pairs = sorted((event_of(away), index) for index, away in self.away.items())
            for event, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
                indices = tuple(index for _, index in group)
                found[event] = attrs.evolve(found.get(event, _NONE), **{what: indices})
        return found


_NONE: Final = Copies()


def plan_swaps(
    storages: Sequence[SavedStorage], times: Sequence[float], link: Link, budget: int
) -> SwapPlan:
    """Return what leaves, so that no more than a budget is on the device, or as little as can be.

    Of the storages that are there at the peak, the ones that are away longest leave first. Forwards
    and backwards that share no time are planned apart.

    Args:
        times: Of the events, not decreasing. Unit: seconds.
        budget: Of saved bytes on the device. Unit: bytes.
    """
    choosers = [_Chooser(storages, group, times, link) for group in _apart(storages)]
    found = [chooser.within(budget) for chooser in choosers]
    least = max((c.peak(away) for c, away in zip(choosers, found, strict=True)), default=0)
    if least > budget:  # then the others need not be below it
        found = [chooser.within(least) for chooser in choosers]
    away = {index: when for part in found for index, when in part.items()}
    none: dict[int, Away] = {}
    return SwapPlan(
        away=away,
        bytes_before=max(on_device(storages, none), default=0),
        bytes_at_peak=max(on_device(storages, away), default=0),
    )


def schedule(
    storages: Sequence[SavedStorage], chosen: Collection[int], times: Sequence[float], link: Link
) -> dict[int, Away] | None:
    """Return when some storages are away; None if one would not be away at all, or waited for."""
    leaving = _leaving(storages, chosen, times, link.to_host)
    fetched = _coming(storages, chosen, times, link.to_device)
    if leaving is None or fetched is None:
        return None
    if any(leaving[index][1] >= fetched[index] for index in chosen):
        return None
    return {index: Away(*leaving[index], fetched[index]) for index in chosen}


def on_device(storages: Sequence[SavedStorage], away: Mapping[int, Away]) -> list[int]:
    """Return the bytes on the device after each event."""
    if not storages:
        return []
    change = [0] * (max(storage.freed for storage in storages) + 2)
    for index, storage in enumerate(storages):
        change[storage.saved] += storage.nbytes
        change[storage.freed + 1] -= storage.nbytes
        if index in away:
            change[away[index].released] -= storage.nbytes
            change[away[index].fetched] += storage.nbytes
    return [*itertools.accumulate(change)][:-1]


class _Chooser:
    """Chooses from storages that share no time with others."""

    def __init__(
        self,
        storages: Sequence[SavedStorage],
        group: Sequence[int],
        times: Sequence[float],
        link: Link,
    ) -> None:
        self._all, self._times, self._link = storages, times, link
        self._first = min(storages[index].saved for index in group)
        self._group = group
        movable = (index for index in group if storages[index].movable)
        self._order = sorted(movable, key=lambda index: (-self._gap(index), index))

    def within(self, budget: int) -> dict[int, Away]:
        """Return what leaves; what does not lower the peak in the end stays."""
        away: dict[int, Away] = {}
        best, least = away, max(self._held(away)) + 1
        refused: set[int] = set()
        while True:
            held = self._held(away)
            most = max(held)
            if most < least:
                best, least = away, most
            if most <= budget:
                return best
            more = self._with_another(away, held.index(most) + self._first, refused)
            if more is None:
                return best
            away = more

    def peak(self, away: Mapping[int, Away]) -> int:
        """Return the most bytes on the device."""
        return max(self._held(away))

    def _with_another(
        self, away: Mapping[int, Away], at: int, refused: set[int]
    ) -> dict[int, Away] | None:
        """Return what leaves, with one more that lowers what is on the device at an event.

        Args:
            refused: Storages that cannot leave beside the others, to which it adds.
        """
        for index in self._order:
            storage = self._all[index]
            if index in away or index in refused or not storage.settled <= at < storage.used:
                continue
            more = schedule(self._all, [*away, index], self._times, self._link)
            if more is None:
                refused.add(index)
            elif self._away_at(at, more) > self._away_at(at, away):
                return more
        return None

    def _gap(self, index: int) -> float:
        storage = self._all[index]
        return self._times[storage.used] - self._times[storage.settled]

    def _held(self, away: Mapping[int, Away]) -> list[int]:
        """Bytes on the device after each event, from the first of the group on."""
        group = [self._all[index] for index in self._group]
        numbers = {place: away[index] for place, index in enumerate(self._group) if index in away}
        return on_device(group, numbers)[self._first :]

    def _away_at(self, event: int, away: Mapping[int, Away]) -> int:
        return sum(
            self._all[index].nbytes
            for index, found in away.items()
            if found.released <= event < found.fetched
        )


def _leaving(
    storages: Sequence[SavedStorage], chosen: Collection[int], times: Sequence[float], rate: float
) -> dict[int, tuple[int, int]] | None:
    """Return when each is sent and released; None if that is not within the step."""
    waiting = sorted(chosen, key=lambda index: (storages[index].settled, index))
    found: dict[int, tuple[int, int]] = {}
    start = idle = 0
    while start < len(waiting):
        sent = max(idle, storages[waiting[start]].settled)
        end = start
        while end < len(waiting) and storages[waiting[end]].settled <= sent:
            end += 1
        batch = waiting[start:end]
        seconds = sum(storages[index].nbytes for index in batch) / rate
        idle = bisect_left(times, times[sent] + seconds, lo=sent + 1)
        if idle == len(times):
            return None
        found |= dict.fromkeys(batch, (sent, idle))
        start = end
    return found


@attrs.define
class _Batch:
    members: list[int]
    nbytes: int
    used: int
    fetched: int = 0


def _coming(
    storages: Sequence[SavedStorage], chosen: Collection[int], times: Sequence[float], rate: float
) -> dict[int, int] | None:
    """Return when each is fetched; None if one cannot arrive before it is used."""
    batches: list[_Batch] = []
    for index in sorted(chosen, key=lambda index: storages[index].used):
        batch = _Batch([index], storages[index].nbytes, storages[index].used)
        while True:
            latest = times[batch.used] - batch.nbytes / rate
            batch.fetched = bisect_right(times, latest, hi=batch.used) - 1
            if batch.fetched >= (batches[-1].used if batches else 0):
                break
            if not batches:
                return None
            before = batches.pop()
            members = [*before.members, *batch.members]
            batch = _Batch(members, before.nbytes + batch.nbytes, before.used)
        batches.append(batch)
    return {index: batch.fetched for batch in batches for index in batch.members}


def _apart(storages: Sequence[SavedStorage]) -> Iterator[list[int]]:
    """Yield groups of storages; all of a group are freed before the next one begins."""
    group: list[int] = []
    end = -1
    for index in sorted(range(len(storages)), key=lambda index: storages[index].saved):
        if group and storages[index].saved > end:
            yield group
            group = []
        group.append(index)
        end = max(end, storages[index].freed)
    if group:
        yield group
