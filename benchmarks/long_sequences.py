"""The curves of docs/long-sequences.md: by network, by length, and by heads.

The first two replay the recorded events of the kernels (``ring_exposure``); the third asks the
plugins what they expect to send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ascend_run.plugin_api import Layout, RankKind
from ascend_run.registry.discovery import discover

from .curves import Picture, Points
from .ring_clock import Event, Network, Trace, compute_of, exposed

IMAGES: Final = Path(__file__).parent.parent / "docs" / "images"
NETWORK, LENGTH, HEADS = (
    IMAGES / f"{name}.svg" for name in ("ring-exposure", "ring-length", "ring-heads")
)

RATE: Final = 400e12
"""Of the device in these curves, in attention. Unit: FLOP/s."""
BETWEEN, INSIDE, PER_NODE = 50e9, 400e9, 4
"""Bytes/s of a rank's way out of its node and inside, and the ranks of a node."""
LATENCY: Final = 10e-6
WIDER: Final = 32
"""Times as many numbers in a position's keys as recorded: 16 key-value heads (and 32 query heads)
of width 128, in the place of 4 (and 8) of 16."""
LENGTHS: Final = tuple(2**i for i in range(8, 17))
NUM_HEADS, RANKS, WIDTH = 32, 8, 128
EXCHANGES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "ring": ("ring-attention", {}),
    "ring, all kept": ("ring-attention", {"kv_cache": "full"}),
    "hybrid": ("hybrid-cp", {"ulysses_degree": PER_NODE}),
    "ulysses": ("ulysses", {}),
}
"""Of the curves over heads."""


def by_network(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Of the network with the fastest nodes, without latency, a way out for each rank."""
    ratio = max(row["ratio"] for row in rows)
    shown = [r for r in rows if (r["ratio"], r["latency"], r["shared"]) == (ratio, 0.0, False)]
    return Picture(
        title=f"exposed communication / computation; nodes {ratio:g} x as fast inside",
        axis="a ring's messages between nodes / its computation",
        x_ticks=[row["load"] for row in shown],
        y_ticks=(0.01, 0.1, 1.0, 10.0),
        least=0.003,
        most=30.0,
    ).draw({name: [(r["load"], r["exposed"][name]) for r in shown] for name in names})


def by_length(traces: Mapping[str, Trace], recorded: int) -> str:
    """Of parts of so many positions, where ``recorded`` are in the traces."""
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
    """The events of parts that are so many times as long, with wider keys."""

    def longer(event: Event) -> Event:
        if event[0] == "compute":
            return "compute", event[1] * times**2 * WIDER
        if event[0] == "wait":
            return event
        kind, number, other, nbytes, channel = event
        return kind, number, other, nbytes * times * WIDER, channel

    return [[longer(event) for event in events] for events in trace]


def by_heads() -> str:
    """What plugins expect to send, over the key-value heads of a model."""
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
    """Bytes on the wire, of one position of a rank."""
    plugin, options = EXCHANGES[name]
    found = discover().load([plugin])[plugin]
    built: Any = found(found.config_class(**options)) if hasattr(found, "config_class") else found()
    rank = RankKind(
        pp_rank=0,
        layers=(0,),
        moe_layers=frozenset(),
        is_first=True,
        is_last=True,
        tokens=1,
        item_bytes=2,
        num_micro_batches=1,
        heads=NUM_HEADS,
        query_groups=groups,
        head_width=WIDTH,
        value_width=WIDTH,
    )
    cost = built.ascend_cost(layout=Layout(world_size=RANKS, cp=RANKS), rank=rank)
    # Of an all-to-all a rank's own part stays.
    return sum(
        m.sent_bytes * (1 - 1 / (m.group_size or RANKS) if m.operation == "all_to_all" else 1)
        for m in cost.messages
    )
