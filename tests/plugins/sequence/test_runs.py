"""Runs with context parallelism against the unsharded run without, and against their plan.

Every layout, with recompute and with other plugins, is in the campaign ``together``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import pytest

from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from tests.support.costs import calls, planned, sent_bytes

from .exchanges import BY_HEADS, IN_BLOCKS, rows

LAYERS, MICRO_BATCHES = 2, 4
NAMES: Final = {
    "all_to_all": "alltoall_base_",
    "send": "send",
    "all_gather": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
}
"""A plan's name of an operation -> the counted name."""
WINDOW: Final = {"model.window_size": [5, 0]}
ODD: Final = {
    "model.hidden_size": 30,
    "model.num_attention_heads": 10,
    "model.num_query_groups": 2,
    "model.kv_channels": 4,
    "data.seq_length": 18,
}
"""Neither heads nor positions are a multiple of the ranks."""


@attrs.frozen(kw_only=True)
class Run:
    plugin: str
    layout: Mapping[str, int]
    model: str = "dense"
    options: Mapping[str, Any] = attrs.field(factory=dict)
    config: Mapping[str, Any] = attrs.field(factory=dict)
    each: Mapping[str, int] = attrs.field(factory=dict)
    """Operation -> calls of a layer and micro-batch, if equal on all ranks."""
    some: str = ""
    """An operation whose calls differ by rank."""

    def __str__(self) -> str:
        return f"{self.plugin}-{self.model}-{dict(self.layout)}"


def ring(plugin: str, layout: Mapping[str, int], hops: int, **more: Any) -> Run:
    """Forward, and twice in backward."""
    return Run(plugin=plugin, layout=layout, each={"send": 3 * hops}, **more)


RUNS = (
    Run(
        plugin="unaligned-ulysses",
        model="moe",
        layout={"cp": 4, "ep": 2},
        config={**ODD, "data.seq_length": 17},
        some="alltoall_base_",
    ),
    Run(
        plugin="unaligned-ulysses",
        layout={"cp": 3, "dp": 1},
        config={"data.seq_length": 17},
        some="alltoall_base_",
    ),
    ring("double-ring", {"cp": 4}, 3, options={"window": 1}),
    ring("hybrid-cp", {"cp": 4, "ep": 2}, 1, model="moe"),
    Run(
        plugin="kv-allgather-cp",
        model="moe",
        layout={"cp": 2, "pp": 2, "ep": 2},
        options={"groups_at_once": 1},
        some="_allgather_base_",
    ),
    Run(plugin="adaptive-cp", layout={"cp": 2, "tp": 2}, config=WINDOW, some="send"),
    Run(plugin="hybrid-adaptive-cp", layout={"cp": 4}, config=WINDOW, some="alltoall_base_"),
)
"""With options and shapes that the campaign does not have. Those of Ulysses and of the ring are in
their own suites, which apply to any replacement."""


@pytest.mark.exhaustive(by=lambda run: run.config)
@pytest.mark.parametrize("run", rows(RUNS))
def test_loss_gradients_and_weights_are_those_of_the_whole(parity: Parity, run: Run) -> None:
    for outcome in parity(
        run.plugin,
        model=run.model,
        layout=run.layout,
        config=run.config,
        options={f"plugins.{run.plugin}.{name}": x for name, x in run.options.items()},
    ):
        for operation, each in run.each.items():
            assert outcome.collectives.get(operation, 0) == LAYERS * MICRO_BATCHES * each
        assert not run.some or outcome.collectives[run.some] > 0


@attrs.frozen(kw_only=True)
class Planned:
    """A run, and the communication in its plan: (operation, group) -> calls and bytes of the rank
    that sends most; for a group of its own axis, all."""

    plugin: str
    groups: Mapping[tuple[str, str], tuple[int, ...] | None]
    size: int = 4
    options: Mapping[str, Any] = attrs.field(factory=dict)
    config: Mapping[str, Any] = attrs.field(factory=dict)

    def __str__(self) -> str:
        return "-".join([self.plugin, str(self.size), *map(str, self.options.values())])


def keeping(plugin: str, groups: Mapping[Any, Any], size: int, **options: Any) -> list[Planned]:
    """Each KV cache policy, in one of two layers."""
    policies = {"none": 1, "half": 2, "full": 2}
    return [
        Planned(
            plugin=plugin,
            groups=groups,
            size=size,
            options={"kv_cache": kv_cache, "kv_cache_every": every, **options},
        )
        for kv_cache, every in policies.items()
    ]


PLANNED = (
    *(Planned(plugin="ulysses", groups={("all_to_all", "cp"): None}, size=size) for size in (2, 4)),
    *(
        Planned(
            plugin="unaligned-ulysses",
            groups={("all_to_all", "cp"): None},
            options={"kv_cache": kv_cache, "kv_cache_every": 2},
            config=ODD,
        )
        for kv_cache in ("half", "full")
    ),
    *keeping("ring-attention", {("send", "cp"): None}, 2),
    *keeping(
        "double-ring",
        {("send", "double_ring_window"): (0, 1), ("send", "double_ring_windows"): (0, 2)},
        4,
    ),
    *keeping(
        "hybrid-cp",
        {("all_to_all", "hybrid_cp_heads"): (0, 1), ("send", "hybrid_cp_window"): (0, 2)},
        4,
    ),
    *keeping(
        "kv-allgather-cp",
        {("all_gather", "cp"): (0, 1), ("reduce_scatter", "cp"): (0, 1)},
        2,
        groups_at_once=1,
    ),
    Planned(plugin="adaptive-cp", groups={("send", "cp"): None}, config=WINDOW),
    Planned(
        plugin="hybrid-adaptive-cp",
        groups={
            ("all_to_all", "hybrid_adaptive_cp_heads"): None,
            ("send", "hybrid_adaptive_cp_keys"): None,
        },
        config=WINDOW,
    ),
)


@pytest.mark.exhaustive(by=lambda row: ())
@pytest.mark.parametrize("row", rows(PLANNED))
def test_communication_volume_matches_the_plan(gloo_pool: GlooPool, row: Planned) -> None:
    """For the rank that sends most, which a plan shows."""
    config = {
        **DENSE,
        **row.config,
        "parallel.context_parallel_size": row.size,
        **{f"plugins.{row.plugin}.{name}": value for name, value in row.options.items()},
    }
    _, (cost,) = planned(config, (row.plugin,), row.size)
    trial = Trial(plugins=(row.plugin,), config=config, steps=1)
    counted = {NAMES[operation] for operation, _ in row.groups}
    most = max(
        gloo_pool.run(run_trial, row.size, trial),
        key=lambda outcome: sum(
            m.nbytes for m in outcome.collective_calls if m.operation in counted
        ),
    )
    for (operation, group), ranks in row.groups.items():
        sent = [
            m.nbytes
            for m in most.collective_calls
            if m.operation == NAMES[operation] and ranks in (None, m.ranks)
        ]
        assert calls(cost, operation, group) == len(sent)
        assert sent_bytes(cost, operation, group) == sum(sent)


@pytest.mark.parametrize("name", rows((*BY_HEADS, *IN_BLOCKS)))
def test_one_rank_exchanges_nothing_and_expects_nothing(name: str) -> None:
    _, (cost,) = planned(DENSE, (name,))
    assert cost.communication == ()
    assert name not in cost.changes
