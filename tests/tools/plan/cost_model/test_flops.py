"""FLOPs, against torch's own counter on a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial
from ascend_run.tools.plan.cost_model.flops import attention_flops, keys_seen
from ascend_run.tools.plan.cost_model.sizes import sizes_of
from tests.support.costs import planned

from .cost_jobs import count_flops


@pytest.mark.parametrize("model", ["dense", "moe", "mtp"])
def test_they_are_what_torch_counts_in_a_step(gloo_pool: GlooPool, model: str) -> None:
    config = {"dense": DENSE, "moe": MOE, "mtp": {**DENSE, "model.mtp_num_layers": 2}}[model]
    prepared, (cost,) = planned(config)
    sizes = sizes_of(prepared.config, prepared.layout)

    ((matmuls, unmasked),) = gloo_pool.run(count_flops, 1, Trial(config=dict(config)))

    layers = config["model.num_layers"] + config.get("model.mtp_num_layers", 0)
    passes = layers * config["train.global_batch_size"]
    attention = 3.5 * attention_flops(prepared.config, sizes, 0) * passes
    assert cost.flops - attention == matmuls
    length = config["data.seq_length"]
    assert attention == unmasked * (length + 1) / (2 * length)  # causal, the diagonal with it
    assert cost.model_flops == cost.flops - attention / 7  # backward's scores, recomputed


@pytest.mark.needs_plugins("alibi", "flash-attention")
def test_scores_that_are_at_hand_are_computed_in_whole_blocks(gloo_pool: GlooPool) -> None:
    config = {**DENSE, "data.seq_length": 300, "train.global_batch_size": 1}
    cases = [
        (("flash-attention",), {"plugins.flash-attention.kernel": "blocks"}),
        (("alibi",), {"model.position_embedding_type": "none", "model.window_size": [40, 0]}),
    ]
    for plugins, values in cases:
        _, (cost,) = planned({**config, **values}, plugins)
        trial = Trial(config={**config, **values}, plugins=plugins)

        ((matmuls, fused),) = gloo_pool.run(count_flops, 1, trial)

        assert fused == 0
        assert cost.flops == pytest.approx(matmuls, rel=1e-12)


@pytest.mark.needs_plugins("eod-reset")
def test_documents_of_a_known_length_are_computed_alone(gloo_pool: GlooPool) -> None:
    every, plugins = 6, ("eod-reset",)  # two of them, and a rest
    config = {**DENSE, "data.seq_length": 16, "train.global_batch_size": 1}
    documents = {**config, "plugins.eod-reset.document_length": every}
    _, (plain,) = planned(config)
    _, (cost,) = planned(documents, plugins)

    trials = [Trial(config=config), Trial(config=documents, plugins=plugins)]
    ((matmuls, whole),), ((same, cut),) = (gloo_pool.run(count_flops, 1, t) for t in trials)

    assert same == matmuls
    assert cut / whole == (2 * 6 * 6 + 4 * 4) / (16 * 16)  # as if nothing were masked
    seen = (2 * 6 * 7 + 4 * 5) / (16 * 17)
    assert cost.flops - matmuls == pytest.approx((plain.flops - matmuls) * seen, rel=1e-12)


_TP = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
_PP = {"parallel.pipeline_model_parallel_size": 2}
_CP = {"parallel.context_parallel_size": 2}
_EP = {"parallel.expert_model_parallel_size": 2}
_SHARED = {"model.moe_shared_expert_intermediate_size": 48}


@pytest.mark.exhaustive(by=lambda model: ["experts"] if model is MOE else [])
@pytest.mark.parametrize(
    ("model", "values", "plugin"),
    [
        pytest.param(DENSE, {**_TP, **_PP}, None, id="tp-pp"),
        pytest.param(MOE, {**_TP, **_EP, **_SHARED}, None, id="tp-ep-shared-experts"),
        pytest.param(
            DENSE, {**_TP, **_CP}, "ulysses", id="tp-cp", marks=pytest.mark.needs_plugins("ulysses")
        ),
        pytest.param(
            DENSE, {**_TP, **_PP}, "lora", id="adapters", marks=pytest.mark.needs_plugins("lora")
        ),
    ],
)
def test_ranks_compute_their_part_of_it(
    gloo_pool: GlooPool, model: Mapping[str, Any], values: Mapping[str, Any], plugin: str | None
) -> None:
    """The mean over a stage: which expert has more tokens is the routing's affair."""
    # Every rank has as many rows of the vocabulary.
    config = {**model, **values, "model.vocab_size": 96}
    plugins = () if plugin is None else (plugin,)
    prepared, costs = planned(config, plugins, world_size=4)

    counted = gloo_pool.run(count_flops, 4, Trial(config=config, plugins=plugins))

    length = config["data.seq_length"]
    for stage, cost in enumerate(costs):
        found = [
            matmuls + unmasked * (length + 1) / (2 * length)
            for rank, (matmuls, unmasked) in enumerate(counted)
            if prepared.layout.coordinate("pp", rank) == stage
        ]
        assert cost.flops == pytest.approx(sum(found) / len(found), rel=1e-9)


@pytest.mark.parametrize(
    ("length", "window", "mean"),
    [(4, None, (1 + 2 + 3 + 4) / 4), (4, (1, 0), (1 + 2 + 2 + 2) / 4), (4, (-1, 0), 2.5)],
)
def test_a_query_sees_itself_and_what_is_before_it(
    length: int, window: tuple[int, int] | None, mean: float
) -> None:
    assert keys_seen(length, window) == mean


def test_recomputation_counts_twice_but_not_in_model_flops() -> None:
    _, (plain,) = planned(DENSE)
    _, (again,) = planned(
        {
            **DENSE,
            "model.recompute_granularity": "full",
            "model.recompute_method": "uniform",
            "model.recompute_num_layers": 1,
        }
    )
    output = 6 * 16 * 4 * 32 * 90
    backward = plain.flops - output
    assert again.model_flops == plain.model_flops
    attention = plain.flops - plain.model_flops  # half a forward of it, for the flash backward
    forward = (backward - attention) / 3
    assert again.flops == pytest.approx(plain.flops + forward)
