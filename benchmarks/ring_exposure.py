"""``python -m benchmarks.ring_exposure [--record]``: how much of its messages a ring shows.

``--record`` runs the kernels on gloo ranks and writes what each rank did, in order, to
``benchmarks/results/ring_traces.json``. The clock then replays those events on networks of two
levels, and writes ``benchmarks/results/ring_exposure.json`` and the pictures of
docs/long-sequences.md (``long_sequences``). Nothing is timed, so a busy machine gives the same
numbers.

Exits with 1 where the overlap, or the double ring beside the plain one, saves less than it must.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.plugin_api.testing.pool import GlooPool

from . import long_sequences
from .ring_clock import Event, Network, as_events, compute_of, exposed, least_exposed
from .ring_trace import record

RANKS, PER_NODE, PART = 8, 4, 32
SCHEDULES: Final[Mapping[str, tuple[str, Mapping[str, Any], bool]]] = {
    "ring without overlap": ("ring-attention", {}, False),
    "ring": ("ring-attention", {}, True),
    "ring, all kept": ("ring-attention", {"kv_cache": "full"}, True),
    "double ring": ("double-ring", {"window": PER_NODE}, True),
    "double ring, all kept": ("double-ring", {"window": PER_NODE, "kv_cache": "full"}, True),
    "hybrid": ("hybrid-cp", {"ulysses_degree": PER_NODE}, True),
    "ulysses": ("ulysses", {}, True),
    "kv all-gather": ("kv-allgather-cp", {}, True),
    "kv all-gather, by heads": ("kv-allgather-cp", {"groups_at_once": 1}, True),
}
"""Name -> plugin, its options, and whether its messages travel beside the computation."""
SAVED: Final = 0.4
"""Least share of what one schedule shows that another saves."""


@attrs.frozen
class Saving:
    """A schedule that nowhere shows more than another, and less by ``SAVED`` up to a load: that of
    each kind of network."""

    better: str
    worse: str
    one_level: float
    shared: float
    """Of two levels, the ranks of a node with one way out of it."""
    two_levels: float

    def most(self, row: Mapping[str, Any]) -> float:
        if row["ratio"] == 1:
            return self.one_level
        return self.shared if row["shared"] else self.two_levels


SAVINGS: Final = (
    # An overlap hides no more than there is computation, whatever the messages take.
    Saving("ring", "ring without overlap", 2.0, 2.0, 2.0),
    # On one level the double ring has as many bytes as the ring on its links, but one.
    Saving("double ring", "ring without overlap", 3.0, math.inf, math.inf),
    Saving("double ring", "ring", 0.0, 0.0, math.inf),
    Saving("double ring, all kept", "ring, all kept", 0.0, 0.0, math.inf),
)
LOADS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""All messages of the plain ring over a link between nodes, in parts of its computation."""
RATIOS: Final = (1.0, 4.0, 8.0)
"""Bandwidth inside a node, in that between nodes; 1 is a network of one level."""
LATENCIES: Final = (0.0, 0.02)
"""Of a message between nodes, in parts of a step's computation; inside a quarter of it."""
FOLDER: Final = Path(__file__).parent / "results"
TRACES, RESULT = FOLDER / "ring_traces.json", FOLDER / "ring_exposure.json"


def record_all(pool: GlooPool, ranks: int) -> dict[str, list[list[Event]]]:
    """Events of every schedule on every rank, from real runs."""
    return {
        name: pool.run(record, ranks, plugin, dict(options), PART, overlaps, timeout=300)
        for name, (plugin, options, overlaps) in SCHEDULES.items()
    }


def networks(
    ring: Sequence[Sequence[Event]], load: float, speed: float, per_node: int = PER_NODE
) -> list[tuple[dict[str, Any], Network]]:
    """Those on which the plain ring's messages take ``load`` times its computation."""
    sent = max(sum(e[3] for e in events if e[0] == "send") for events in ring)
    computation = compute_of(ring) / speed
    between = sent / (load * computation)
    step = computation / len(ring)
    return [
        (
            {"load": load, "ratio": ratio, "latency": latency, "shared": shared},
            Network(
                per_node=per_node,
                inside=ratio * between,
                between=between,
                latency_between=latency * step,
                latency_inside=latency * step / 4,
                shared=shared,
            ),
        )
        for ratio in RATIOS
        for latency in LATENCIES
        for shared in (False, True)
    ]


def rows(traces: Mapping[str, Sequence[Sequence[Event]]]) -> list[dict[str, Any]]:
    """A network each, with every schedule's exposed time in parts of the computation, and what the
    double ring's bytes alone would show if they were sent at the best of times."""
    speed = compute_of(traces["ring"])
    found = []
    for load in LOADS:
        for about, network in networks(traces["ring"], load, speed):
            shown = {name: round(exposed(t, network, speed), 6) for name, t in traces.items()}
            least = round(least_exposed(traces["double ring"], network, speed), 6)
            found.append({**about, "exposed": shown, "least of double ring": least})
    return found


def problems(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where what must be better is not."""
    told = []
    for pair in SAVINGS:
        for row in found:
            mine, other = row["exposed"][pair.better], row["exposed"][pair.worse]
            asked = 1 - SAVED if row["load"] <= pair.most(row) else 1.0
            if mine > asked * other + 2e-6:  # of the rounding
                told.append(
                    f"{pair.better} shows {mine:g}, {pair.worse} {other:g}, and at most {asked:g} "
                    f"times that is asked: {_network(row)}"
                )
    return told


def _network(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={row[key]}" for key in ("load", "ratio", "latency", "shared"))


def pictures(
    traces: Mapping[str, Sequence[Sequence[Event]]], found: Sequence[Mapping[str, Any]]
) -> dict[Path, str]:
    """File -> what stands in it."""
    return {
        long_sequences.NETWORK: long_sequences.by_network(found, [*SCHEDULES]),
        long_sequences.LENGTH: long_sequences.by_length(traces, PART),
        long_sequences.HEADS: long_sequences.by_heads(),
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring_exposure")
    parser.add_argument("--record", action="store_true")
    if parser.parse_args(words).record:
        with GlooPool() as pool:
            TRACES.write_text(json.dumps(record_all(pool, RANKS), separators=(",", ":")) + "\n")
    traces = as_events(json.loads(TRACES.read_text()))
    found = rows(traces)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    for picture, drawn in pictures(traces, found).items():
        picture.write_text(drawn)
    for problem in (told := problems(found)):
        print(problem, file=sys.stderr)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
