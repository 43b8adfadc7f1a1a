"""Declarations and errors of every context-parallel plugin, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import Claim, Layout, Numerics, RunConfig
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.types.config import DataSection
from tests.support.ring_jobs import run_of
from tests.support.tiny_configs import model_fields, parallel_fields

from .exchanges import BY_HEADS, IN_BLOCKS, exchange, rows


@pytest.mark.parametrize("name", rows((*BY_HEADS, *IN_BLOCKS)))
def test_it_claims_context_parallelism_and_is_idle_on_one_rank(name: str) -> None:
    plugin, alone = exchange(name), Layout(world_size=1, cp=1)
    manifest = plugin.manifest
    assert claims_of(plugin) == (Claim.CONTEXT_PARALLEL,)
    assert manifest.numerics is Numerics.ROUNDING
    one = attrs.evolve(
        run_of(2), parallel=parallel_fields({**run_of(2).parallel, "context_parallel_size": 1})
    )
    assert manifest.idle.holds(one)
    assert not manifest.idle.holds(run_of(2))
    assert plugin.ascend_sequence_partition(config=one) is None
    assert plugin.ascend_sequence_partition(config=run_of(2)) is not None
    assert plugin.ascend_check(config=one, layout=alone) == []
    assert plugin.ascend_process_groups(config=one, layout=alone) == {}
    assert plugin.ascend_attention(config=one, groups=None, layer_index=0) is None


@attrs.frozen(kw_only=True)
class Refused:
    plugin: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    sizes: Mapping[str, int]
    words: tuple[str, ...]
    """Words of the single error; none: it is accepted."""

    def __str__(self) -> str:
        return f"{self.plugin}-{dict(self.options)}-{dict(self.sizes)}"


DEGREES = (
    ({"ulysses_degree": 3}, {"cp": 4}, ("ulysses_degree=3", "size=4", "1, 2 or 4")),
    (
        {"ulysses_degree": 4},
        {"cp": 8, "tp": 2, "heads": 12},
        ("12 heads", "tp=2", "ulysses_degree=4", "1 or 2"),
    ),
    ({"ulysses_degree": 4}, {"cp": 8, "tp": 2}, ()),
    ({"ulysses_degree": 4}, {"cp": 1}, ()),
)
REFUSED = (
    *(
        Refused(
            plugin="double-ring",
            options={"window": window},
            sizes={"cp": cp},
            words=(
                f"plugins.double-ring.window={window}",
                f"parallel.context_parallel_size={cp}",
                f"a window of {fitting}",
            ),
        )
        for cp, window, fitting in (
            (6, 4, "1, 2, 3 or 6"),
            (4, 3, "1, 2 or 4"),
            (2, 4, "1 or 2"),
        )
    ),
    Refused(plugin="double-ring", sizes={"cp": 8}, words=()),
    *(
        Refused(plugin=name, options=options, sizes=sizes, words=words)
        for name in ("hybrid-cp", "hybrid-adaptive-cp")
        for options, sizes, words in DEGREES
    ),
    Refused(
        plugin="hybrid-cp",
        options={"window": 3},
        sizes={"cp": 8},
        words=("window=3", "ring of 4", "1, 2 or 4"),
    ),
    *(
        Refused(
            plugin=name,
            options={"kv_cache": "half", "kv_cache_every": 5},
            sizes={"cp": 2},
            words=(f"plugins.{name}.kv_cache_every=5", "model.num_layers=2"),
        )
        for name in (*BY_HEADS, *IN_BLOCKS)
        if "adaptive" not in name
    ),
)


@pytest.mark.parametrize("row", rows(REFUSED))
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(row: Refused) -> None:
    cp, tp = row.sizes["cp"], row.sizes.get("tp", 1)
    config = RunConfig(
        model=model_fields({"num_attention_heads": row.sizes.get("heads", 8), "num_layers": 2}),
        parallel=parallel_fields(
            {
                "context_parallel_size": cp,
                "tensor_model_parallel_size": tp,
                "sequence_parallel": tp > 1,
            }
        ),
        data=DataSection(seq_length=64),
    )
    layout = Layout(world_size=cp * tp, cp=cp, tp=tp)
    plugin = exchange(row.plugin, **row.options)
    problems = plugin.ascend_check(config=config, layout=layout)
    assert len(problems) == bool(row.words)
    for word in row.words:
        assert word in problems[0]
    if row.words and "does not divide" in problems[0]:
        assert plugin.ascend_process_groups(config=config, layout=layout) == {}
