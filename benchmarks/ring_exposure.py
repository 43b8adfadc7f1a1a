"""``python -m benchmarks.ring_exposure [--record]``: how much of its messages a ring shows.

``--record`` runs the kernels on gloo ranks and writes what each rank did, in order, to
``benchmarks/results/ring_traces.json``. The clock then replays those events on networks of two
levels, and writes ``benchmarks/results/ring_exposure.json`` and ``docs/images/ring-exposure.svg``.
Nothing is timed, so a busy machine gives the same numbers.

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

from ascend_run.plugin_api.testing.pool import GlooPool

from .exposure_plot import svg
from .ring_clock import Event, Network, as_events, compute_of, exposed
from .ring_trace import record

RANKS, PER_NODE, PART = 8, 4, 32
SCHEDULES: Final[Mapping[str, tuple[str, Mapping[str, Any], bool]]] = {
    "ring without overlap": ("ring-attention", {}, False),
    "ring": ("ring-attention", {}, True),
    "ring, all kept": ("ring-attention", {"keep": "all"}, True),
    "double ring": ("double-ring", {"window": PER_NODE}, True),
    "double ring, all kept": ("double-ring", {"window": PER_NODE, "keep": "all"}, True),
    "hybrid": ("hybrid-cp", {"ulysses_degree": PER_NODE}, True),
    "ulysses": ("ulysses", {}, True),
}
"""Name -> plugin, its options, and whether its messages travel beside the computation."""
BETTER: Final = (
    ("ring", "ring without overlap", 1.5),
    ("double ring", "ring", math.inf),
    ("double ring, all kept", "ring, all kept", math.inf),
)
"""The first never shows more than the second; and less by ``SAVED`` up to this load. An overlap
hides no more than there is computation, whatever the messages take."""
SAVED: Final = 0.4
"""Least share of what the second shows that the first saves, on each network whose nodes are faster
inside and whose ranks have a way out each."""
LOADS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
"""All messages of the plain ring over a link between nodes, in parts of its computation."""
RATIOS: Final = (1.0, 4.0, 8.0)
"""Bandwidth inside a node, in that between nodes; 1 is a network of one level."""
LATENCIES: Final = (0.0, 0.02)
"""Of a message between nodes, in parts of a step's computation; inside a quarter of it."""
FOLDER: Final = Path(__file__).parent / "results"
TRACES, RESULT = FOLDER / "ring_traces.json", FOLDER / "ring_exposure.json"
PICTURE: Final = Path(__file__).parent.parent / "docs" / "images" / "ring-exposure.svg"


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
    """A network each, with every schedule's exposed time in parts of the computation."""
    speed = compute_of(traces["ring"])
    found = []
    for load in LOADS:
        for about, network in networks(traces["ring"], load, speed):
            shown = {name: round(exposed(t, network, speed), 6) for name, t in traces.items()}
            found.append({**about, "exposed": shown})
    return found


def problems(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where what must be better is not."""
    told = []
    for better, worse, most in BETTER:
        for row in found:
            mine, other = row["exposed"][better], row["exposed"][worse]
            two_levels = row["ratio"] > 1 and not row["shared"]
            asked = 1 - SAVED if two_levels and row["load"] <= most else 1.0
            if mine > asked * other + 2e-6:  # of the rounding
                told.append(
                    f"{better} shows {mine:g}, {worse} {other:g}, and at most {asked:g} times that "
                    f"is asked: {_network(row)}"
                )
    return told


def _network(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={row[key]}" for key in ("load", "ratio", "latency", "shared"))


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring_exposure")
    parser.add_argument("--record", action="store_true")
    if parser.parse_args(words).record:
        with GlooPool() as pool:
            TRACES.write_text(json.dumps(record_all(pool, RANKS), separators=(",", ":")) + "\n")
    found = rows(as_events(json.loads(TRACES.read_text())))
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    PICTURE.write_text(svg(found, [*SCHEDULES]))
    for problem in (told := problems(found)):
        print(problem, file=sys.stderr)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
