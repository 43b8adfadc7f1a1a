"""The plugin's declarations, errors, rule and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_run.ops.experts.moe_recompute import Saves
from ascend_run.plugin_api import Numerics, RunConfig
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.memory.moe_adaptive_recompute import (
    MoeAdaptiveRecompute,
    MoeAdaptiveRecomputeConfig,
)
from ascend_run.plugins.memory.moe_adaptive_recompute.threshold import Threshold
from ascend_run.testing.models import MOE
from ascend_run.testing.pool import GlooPool
from tests.support.costs import planned
from tests.support.moe_memory import kept_bytes
from tests.support.tiny_configs import model_fields, parallel_fields

SCALE = "plugins.moe-adaptive-recompute.scale"
KEEP = "plugins.moe-adaptive-recompute.keep_tokens"
EP = {"parallel.expert_model_parallel_size": 2}
EXPERT_TP = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.sequence_parallel": True,
    "parallel.expert_tensor_parallel_size": 2,
}


def problems(**model: Any) -> str:
    run = RunConfig(model=model_fields({"num_moe_experts": 4, **model}), parallel=parallel_fields())
    plugin = MoeAdaptiveRecompute(MoeAdaptiveRecomputeConfig())
    return "; ".join(plugin.ascend_check(config=run))


def test_it_claims_nothing_and_changes_no_bit() -> None:
    assert claims_of(MoeAdaptiveRecompute) == ()
    assert MoeAdaptiveRecompute.manifest.numerics is Numerics.BITWISE


def test_a_negative_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="scale"):
        MoeAdaptiveRecomputeConfig(scale=-0.1)


def test_experts_are_not_recomputed_twice() -> None:
    assert problems() == ""
    assert "recompute_granularity=full" in problems(recompute_granularity="full")
    selective = {"recompute_granularity": "selective"}
    assert problems(**selective, recompute_modules=["core_attn"]) == ""
    refused = problems(**selective, recompute_modules=["moe"])
    assert "model.recompute_modules names moe" in refused
    assert problems(num_moe_experts=None, recompute_granularity="full") == ""


@pytest.mark.parametrize(
    ("counts", "saves"),
    [([8, 8, 8, 8], Saves.ALL), ([16, 0, 8, 8], Saves.ALL), ([17, 0, 8, 7], Saves.TOKENS)],
)
def test_more_than_scale_times_the_mean_exceeds(counts: list[int], saves: Saves) -> None:
    """16 tokens with two experts each, of four: a mean of 8."""
    rule = Threshold(scale=2.0, mean_by_token=2 / 4, group=None, device=torch.device("cpu"))
    assert rule.choose(torch.tensor(counts), 16) is saves
    assert rule.exceeded == int(saves is Saves.TOKENS)


def test_its_panel_names_the_metric_that_it_gives() -> None:
    plugin = MoeAdaptiveRecompute(MoeAdaptiveRecomputeConfig())
    (panel,) = plugin.ascend_report()
    ((group, read),) = plugin.ascend_metrics().items()
    assert [f"{group}/{name}" for name in read(context=None)] == [*panel.metrics]  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [True, False])
def test_memory_follows_the_threshold(gloo_pool: GlooPool, keep: bool) -> None:
    """A router that prefers two of eight experts exceeds 1.9 times the mean; a token of an expert
    then keeps H values or none, where it would keep H + 5 F."""
    tokens, hidden, width, item = 64, 32, 48, 4
    config = {**MOE, "model.num_moe_experts": 8, "data.seq_length": tokens}
    plugin = ("moe-adaptive-recompute",)
    (kept,) = gloo_pool.run(
        kept_bytes,
        1,
        [
            ((), config),
            (plugin, {**config, SCALE: 1.9, KEEP: keep}),
            (plugin, {**config, SCALE: 8.0, KEEP: keep}),
        ],
        0.5,
    )
    plain, exceeded, below = kept
    dropped = tokens * 2 * item * (5 * width + (0 if keep else hidden))
    assert below == plain
    assert [a - b for a, b in zip(plain, exceeded, strict=True)] == [dropped] * 2


@pytest.mark.parametrize("keep", [True, False])
def test_plan_counts_what_a_balanced_routing_exceeds(keep: bool) -> None:
    config = {**MOE, "model.moe_shared_expert_intermediate_size": 48}
    (plain,) = planned(config)[1]
    below, above = (
        planned({**config, SCALE: scale, KEEP: keep}, ("moe-adaptive-recompute",))[1][0]
        for scale in (1.0, 0.99)
    )
    change = above.changes["moe-adaptive-recompute"]
    (moved,) = change.saved
    assert "moe-adaptive-recompute" not in below.changes
    assert below.memory == plain.memory
    assert not any(name.startswith("shared_experts") for name in moved.tensors)
    assert moved.layers == tuple(range(MOE["model.num_layers"]))
    assert "experts.input" in moved.tensors
    assert change.saved_added_layers == (moved.layers if keep else ())
    tokens = next(t.nbytes for t in plain.rank.saved[0] if t.key == "experts.input")
    assert [tensor.nbytes for tensor in change.saved_added] == [tokens]
    more = 2 * sum(p.numel for p in above.rank.parameters if p.part == "experts" and p.is_matrix)
    rows = 16 * 2 / config["model.num_moe_experts"] * above.rank.num_microbatches
    assert above.flops - plain.flops == pytest.approx(more * rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("layout", "share"), [(EP, 1), (EXPERT_TP, 2)], ids=["ep", "expert tp"])
def test_memory_follows_the_threshold_on_two_ranks(
    gloo_pool: GlooPool, layout: dict[str, Any], share: int, keep: bool
) -> None:
    """Together on both, since the routing decides how much each saves: every token of both has two
    experts, on one rank each or on both, which then have half of an expert's width."""
    tokens, hidden, width, item = 64, 32, 48, 4
    config = {**MOE, **layout, "model.num_moe_experts": 8, "data.seq_length": tokens}
    options = {SCALE: 0.0, KEEP: keep}
    runs = [((), config), (("moe-adaptive-recompute",), {**config, **options})]
    kept = gloo_pool.run(kept_bytes, 2, runs)
    rows = 2 * tokens * 2
    dropped = rows * item * (5 * width + (0 if keep else share * hidden))
    for layer in range(2):
        assert sum(plain[layer] - found[layer] for plain, found in kept) == dropped
