"""Multi-latent attention in every layout against one rank: loss, gradients and trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import Runs
from tests.support.latent_models import LATENT, MODEL

FULL = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
CORE = {"model.recompute_granularity": "selective", "model.recompute_modules": ["core_attn"]}


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize(
    ("layout", "config"),
    [({"tp": 2}, CORE), ({"pp": 2, "dp": 2, "ep": 2}, FULL)],
    ids=["tensors and sequences, cores again", "stages and experts, all again"],
)
def test_every_layout_computes_what_one_rank_does(
    parity: Parity, layout: dict[str, int], config: dict[str, Any]
) -> None:
    parity((), model="moe", layout=layout, config={**LATENT, **config})


@pytest.mark.exhaustive(
    by=lambda plugin, layout: [] if "tp" in layout else [plugin.endswith("ulysses")]
)
@pytest.mark.parametrize(
    ("plugin", "layout", "options"),
    [
        pytest.param(plugin, layout, options, marks=pytest.mark.needs_plugins(plugin), id=plugin)
        for plugin, layout, options in (
            ("ulysses", {"cp": 2, "tp": 2}, {}),
            ("ring-attention", {"cp": 2}, {}),
            ("double-ring", {"cp": 2}, {"window": 1}),
            ("hybrid-cp", {"cp": 4}, {}),
            ("kv-allgather-cp", {"cp": 2}, {}),
            ("unaligned-ulysses", {"cp": 2}, {}),
            ("adaptive-cp", {"cp": 2}, {}),
        )
    ],
)
def test_the_sequence_may_be_shared_out(
    parity: Parity, plugin: str, layout: dict[str, int], options: dict[str, Any]
) -> None:
    given = {f"plugins.{plugin}.{name}": value for name, value in options.items()}
    for outcome in parity(plugin, model="moe", layout=layout, config=LATENT, options=given):
        assert sum(outcome.collectives.values()) > 0


def test_a_run_in_two_halves_is_the_run_in_one(gloo_pool: GlooPool, tmp_path: Path) -> None:
    small = {"model.attention_dropout": 0.1, "model.hidden_dropout": 0.1}
    small["train.global_batch_size"] = 2
    tensors = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
    runs = Runs(gloo_pool, tmp_path, ({**MODEL, **small, **tensors}, 2, ()))
    runs.assert_the_same_in_two_halves()
