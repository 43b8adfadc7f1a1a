"""Simulate recorded events on a network with two levels, and return how long they take.

A send starts when both sides have posted it and the sender's egress and the receiver's ingress
links are free; sends that were ready first go first, then those that were posted first. It occupies
both links for its bytes, and arrives one latency later. Links inside a node and between nodes are
separate. Computation takes time in proportion to its FLOPs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

Event = tuple[Any, ...]
"""See ``ring_trace``."""
Trace = Sequence[Sequence[Event]]
"""Events of every rank."""


@attrs.frozen(kw_only=True)
class Network:
    """A network with two levels of links; the caller chooses the units of time and bytes."""

    per_node: int
    """Ranks of one node."""
    inside: float
    """Bandwidth of one rank in one direction: bytes per unit of time; likewise below."""
    between: float
    latency_inside: float = 0.0
    latency_between: float = 0.0
    shared: bool = False
    """Whether the ranks of a node share one link to other nodes in each direction."""

    def link(self, source: int, target: int) -> tuple[str, str, float, float]:
        """Return the egress link, the ingress link, the bandwidth and the latency."""
        nodes = source // self.per_node, target // self.per_node
        if nodes[0] == nodes[1]:
            return f"out {source}", f"in {target}", self.inside, self.latency_inside
        ends = nodes if self.shared else (source, target)
        return f"off {ends[0]}", f"on {ends[1]}", self.between, self.latency_between


@attrs.define
class _Message:
    source: int
    target: int
    nbytes: int
    turn: int
    """Its index among the sends of the rank that posted it first."""
    ready: dict[str, float] = attrs.field(factory=dict)
    """When each side has posted it."""
    done: float | None = None


def makespan(trace: Trace, network: Network | None, products_per_time: float) -> float:
    """Return when the last rank finishes; without a network, communication takes no time.

    Raises:
        ValueError: The ranks are in a deadlock.
    """
    return _Replay(trace, network, products_per_time).run()


def exposed(trace: Trace, network: Network, products_per_time: float) -> float:
    """Return the exposed communication: the makespan without that of the computation alone."""
    alone = makespan(trace, None, products_per_time)
    return makespan(trace, network, products_per_time) - alone


class _Replay:
    def __init__(self, trace: Trace, network: Network | None, products_per_time: float) -> None:
        self._network, self._speed = network, products_per_time
        self._left = [deque(events) for events in trace]
        self._now = [0.0] * len(trace)
        self._free: dict[str, float] = {}
        self._known: dict[tuple[int, int], _Message] = {}
        """(rank, its number) -> message."""
        self._open: dict[tuple[int, int, str, str], deque[_Message]] = {}
        """Posted by one side: (source, target, channel, side that has posted) -> sends."""
        self._pending: list[_Message] = []

    def run(self) -> float:
        while any(self._left):
            moved = [self._advance(rank) for rank in range(len(self._left))]
            if not any(moved) and not self._start_one():
                raise ValueError("ranks wait for each other")
        return max(self._now)

    def _advance(self, rank: int) -> bool:
        """Process the rank's events up to a wait whose end is unknown yet."""
        moved = False
        while self._left[rank]:
            kind, *rest = self._left[rank][0]
            if kind == "compute":
                self._now[rank] += rest[0] / self._speed
            elif kind == "wait":
                done = self._known[rank, rest[0]].done
                if done is None:
                    break
                self._now[rank] = max(self._now[rank], done)
            else:
                self._post(rank, kind, *rest)
            self._left[rank].popleft()
            moved = True
        return moved

    def _post(
        self, rank: int, kind: str, number: int, other: int, nbytes: int, channel: str
    ) -> None:
        source, target = (rank, other) if kind == "send" else (other, rank)
        mine, theirs = ("send", "recv") if kind == "send" else ("recv", "send")
        waiting = self._open.setdefault((source, target, channel, theirs), deque())
        if waiting:
            message = waiting.popleft()
            assert message.nbytes == nbytes, "sizes of a send and its receive differ"
            self._pending.append(message)
        else:
            message = _Message(source, target, nbytes, number)
            self._open.setdefault((source, target, channel, mine), deque()).append(message)
        message.ready[kind] = self._now[rank]
        self._known[rank, number] = message

    def _start_one(self) -> bool:
        """Start the send that was ready first; sends that are posted later are ready later."""
        if not self._pending:
            return False
        message = min(self._pending, key=lambda m: (max(m.ready.values()), m.turn))
        self._pending.remove(message)
        ready = max(message.ready.values())
        if self._network is None:
            message.done = ready
            return True
        out, into, bandwidth, latency = self._network.link(message.source, message.target)
        begin = max(ready, self._free.get(out, 0.0), self._free.get(into, 0.0))
        self._free[out] = self._free[into] = begin + message.nbytes / bandwidth
        message.done = self._free[out] + latency
        return True


def least_exposed(trace: Trace, network: Network, products_per_time: float) -> float:
    """Return a lower bound of the exposed communication of any schedule: the time of the busiest
    link beyond that of the computation."""
    busy: dict[str, float] = {}
    for source, events in enumerate(trace):
        for kind, *rest in events:
            if kind == "send":
                _, target, nbytes, _ = rest
                out, into, bandwidth, _ = network.link(source, target)
                for way in (out, into):
                    busy[way] = busy.get(way, 0.0) + nbytes / bandwidth
    return max(0.0, max(busy.values(), default=0.0) - makespan(trace, None, products_per_time))


def compute_of(trace: Trace) -> float:
    """Return the FLOPs of the rank with the most."""
    return max(sum(e[1] for e in events if e[0] == "compute") for events in trace)


def as_events(traces: Mapping[str, Any]) -> dict[str, list[list[Event]]]:
    """Convert traces from JSON."""
    return {
        name: [[tuple(event) for event in events] for events in ranks]
        for name, ranks in traces.items()
    }
