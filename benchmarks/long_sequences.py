"""The charts of docs/long-sequences.md: by network, by sequence length, and by heads.

The first two replay the recorded events of the kernels (``ring_exposure``); the third uses the
plugins' estimates of their communication volume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ascend_run.plugin_api import FieldSection, Layout, PipelineStage, RunConfig
from ascend_run.registry.discovery import discover

from .curves import Picture, Points
from .ring_simulator import Event, Network, Trace, compute_of, exposed

IMAGES: Final = Path(__file__).parent.parent / "docs" / "images"
NETWORK, LENGTH, HEADS = (
    IMAGES / f"{name}.svg" for name in ("ring-exposure", "ring-length", "ring-heads")
)

RATE: Final = 400e12
"""Attention throughput of the device in these charts. Unit: FLOP/s."""
BETWEEN, INSIDE, PER_NODE = 50e9, 400e9, 4
"""Bandwidth of a rank between nodes and inside its node in bytes/s, and the ranks per node."""
LATENCY: Final = 10e-6
WIDER: Final = 32
"""Times as many numbers in a position's keys as recorded: 16 key-value heads (and 32 query heads)
of width 128, instead of 4 (and 8) of 16."""
LENGTHS: Final = tuple(2**i for i in range(8, 17))
NUM_HEADS, RANKS, WIDTH = 32, 8, 128
EXCHANGES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "ring": ("ring-attention", {}),
    "ring, all kept": ("ring-attention", {"kv_cache": "full"}),
    "hybrid": ("hybrid-cp", {"ulysses_degree": PER_NODE}),
    "ulysses": ("ulysses", {}),
}
"""Schedules in the chart over heads."""


def by_network(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Draw the chart for the network with the fastest nodes, no latency, and one link per rank."""
    ratio = max(row["ratio"] for row in rows)
    shown = [r for r in rows if (r["ratio"], r["latency"], r["shared"]) == (ratio, 0.0, False)]
    return Picture(
        title=f"exposed communication / computation; nodes {ratio:g} x as fast inside",
        axis="a ring's sends between nodes / its computation",
        x_ticks=[row["load"] for row in shown],
        y_ticks=(0.01, 0.1, 1.0, 10.0),
        least=0.003,
        most=30.0,
    ).draw({name: [(r["load"], r["exposed"][name]) for r in shown] for name in names})


def by_length(traces: Mapping[str, Trace], recorded: int) -> str:
    """Draw the chart over the sequence length per rank, of which the traces have ``recorded``."""
    network = Network(
        per_node=PER_NODE,
        inside=INSIDE,
        between=BETWEEN,
        latency_inside=LATENCY / 4,
        latency_between=LATENCY,
    )
    curves: dict[str, Points] = {}
    for name, trace in traces.items():
        points = []
        for length in LENGTHS:
            longer = scaled(trace, length / recorded)
            points.append((length, exposed(longer, network, RATE) * RATE / compute_of(longer)))
        curves[name] = points
    return Picture(
        title=f"exposed communication / computation; {RATE / 1e12:g} TFLOP/s, "
        f"{BETWEEN / 1e9:g} GB/s between nodes of {PER_NODE}, {INSIDE / 1e9:g} inside",
        axis="positions of one rank",
        x_ticks=LENGTHS,
        y_ticks=(0.01, 0.1, 1.0, 10.0),
        least=0.003,
        most=30.0,
    ).draw(curves)


def scaled(trace: Trace, times: float) -> list[list[Event]]:
    """Scale the events to longer sequences, with wider keys."""

    def longer(event: Event) -> Event:
        if event[0] == "compute":
            return "compute", event[1] * times**2 * WIDER
        if event[0] == "wait":
            return event
        kind, number, other, nbytes, channel = event
        return kind, number, other, nbytes * times * WIDER, channel

    return [[longer(event) for event in events] for events in trace]


def by_heads() -> str:
    """Draw the plugins' estimated communication volume over the number of key-value heads."""
    counts = [2**i for i in range(6)]
    return Picture(
        title=f"KiB that a rank sends for a position and layer, forward and backward; {RANKS} "
        f"ranks, {NUM_HEADS} heads of {WIDTH}, bf16",
        axis="key-value heads",
        x_ticks=counts,
        y_ticks=(10, 100, 1000),
        least=5.0,
        most=2000.0,
    ).draw({name: [(n, sent(name, n) / 2**10) for n in counts] for name in EXCHANGES})


def sent(name: str, groups: int) -> float:
    """Return the bytes on the wire per position of a rank."""
    plugin, options = EXCHANGES[name]
    found = discover().load([plugin])[plugin]
    built: Any = found(found.config_class(**options)) if hasattr(found, "config_class") else found()
    rank = PipelineStage(
        pp_rank=0,
        layers=(0,),
        moe_layers=frozenset(),
        is_first=True,
        is_last=True,
        tokens=1,
        item_bytes=2,
        num_microbatches=1,
        heads=NUM_HEADS,
        query_groups=groups,
        head_width=WIDTH,
        value_width=WIDTH,
    )
    config = RunConfig(
        model=FieldSection({"num_attention_heads": NUM_HEADS, "window_size": None}),
        parallel=FieldSection({"context_parallel_size": RANKS}),
    )
    layout = Layout(world_size=RANKS, cp=RANKS)
    cost = built.ascend_cost(config=config, layout=layout, rank=rank)
    # A rank's own part of an all-to-all is not sent.
    return sum(
        m.sent_bytes * (1 - 1 / (m.group_size or RANKS) if m.operation == "all_to_all" else 1)
        for m in cost.communication
    )
