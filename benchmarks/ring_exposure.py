"""``python -m benchmarks.ring_exposure [--record]``: exposed communication of ring attention.

``--record`` runs the kernels on gloo ranks and writes the events of each rank, in order, to
``benchmarks/results/ring_traces.json``. The simulator then replays these events on networks with
two levels, and writes ``benchmarks/results/ring_exposure.json`` and the charts of
docs/long-sequences.md (``long_sequences``). Nothing is timed, so that the results do not depend on
the load of the machine.

Exits with 1 if the overlap, or the double ring compared with the plain ring, saves less than
required.
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

from ascend_run.testing.pool import GlooPool

from . import long_sequences
from .ring_simulator import Event, Network, as_events, compute_of, exposed, least_exposed
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
"""Name -> plugin, its options, and whether its communication is overlapped with computation."""
SAVED: Final = 0.4
"""Minimum share of a schedule's exposed communication that another one saves."""


@attrs.frozen
class Saving:
    """A schedule that never exposes more communication than another one, and less by ``SAVED`` up
    to a load that depends on the kind of network."""

    better: str
    worse: str
    one_level: float
    shared: float
    """Load on networks with two levels, in which the ranks of a node share one link."""
    two_levels: float

    def most(self, row: Mapping[str, Any]) -> float:
        if row["ratio"] == 1:
            return self.one_level
        return self.shared if row["shared"] else self.two_levels


SAVINGS: Final = (
    # At most as much communication can be overlapped as there is computation.
    Saving("ring", "ring without overlap", 2.0, 2.0, 2.0),
    # On one level, the links of the double ring carry as many bytes as those of the ring.
    Saving("double ring", "ring without overlap", 3.0, math.inf, math.inf),
    Saving("double ring", "ring", 0.0, 0.0, math.inf),
    Saving("double ring, all kept", "ring, all kept", 0.0, 0.0, math.inf),
)
LOADS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""Communication time of the plain ring over a link between nodes, relative to computation."""
RATIOS: Final = (1.0, 4.0, 8.0)
"""Bandwidth inside a node relative to that between nodes; 1: a network with one level."""
LATENCIES: Final = (0.0, 0.02)
"""Latency between nodes relative to a step's computation; a quarter of it inside a node."""
FOLDER: Final = Path(__file__).parent / "results"
TRACES, RESULT = FOLDER / "ring_traces.json", FOLDER / "ring_exposure.json"


def record_all(pool: GlooPool, ranks: int) -> dict[str, list[list[Event]]]:
    """Record the events of every schedule on every rank, from real runs."""
    return {
        name: pool.run(record, ranks, plugin, dict(options), PART, overlaps, timeout=300)
        for name, (plugin, options, overlaps) in SCHEDULES.items()
    }


def networks(
    ring: Sequence[Sequence[Event]], load: float, speed: float, per_node: int = PER_NODE
) -> list[tuple[dict[str, Any], Network]]:
    """Return networks on which the plain ring communicates for ``load`` times its computation."""
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
    """Return one row per network: the exposed time of every schedule relative to computation, and a
    lower bound for the double ring."""
    speed = compute_of(traces["ring"])
    found = []
    for load in LOADS:
        for about, network in networks(traces["ring"], load, speed):
            shown = {name: round(exposed(t, network, speed), 6) for name, t in traces.items()}
            least = round(least_exposed(traces["double ring"], network, speed), 6)
            found.append({**about, "exposed": shown, "least of double ring": least})
    return found


def problems(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a message for each saving that is not reached."""
    found_problems = []
    for pair in SAVINGS:
        for row in found:
            mine, other = row["exposed"][pair.better], row["exposed"][pair.worse]
            asked = 1 - SAVED if row["load"] <= pair.most(row) else 1.0
            if mine > asked * other + 2e-6:  # values are rounded
                found_problems.append(
                    f"{pair.better} shows {mine:g}, {pair.worse} {other:g}, and at most {asked:g} "
                    f"times that is required: {_network(row)}"
                )
    return found_problems


def _network(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={row[key]}" for key in ("load", "ratio", "latency", "shared"))


def pictures(
    traces: Mapping[str, Sequence[Sequence[Event]]], found: Sequence[Mapping[str, Any]]
) -> dict[Path, str]:
    """Return file -> its content."""
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
    for problem in (found_problems := problems(found)):
        print(problem, file=sys.stderr)
    return 1 if found_problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
