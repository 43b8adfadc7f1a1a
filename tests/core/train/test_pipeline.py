"""Pipeline stages, chunks of them, and uneven ones: the numbers of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool

from .trials import CP, EP, EXCHANGE, PP, TP, VPP, assert_same, outcomes, possible

FOUR = {"model.num_layers": 4}
TIED = {
    "model.share_embeddings_and_output_weights": True,
    "model.position_embedding_type": "learned_absolute",
    "model.qk_layernorm": True,
}
ROUTED = {"model.moe_aux_loss_coeff": 0.1, "model.moe_z_loss_coeff": 0.05}
"""A loss of the router is one of a micro-batch: both runs must take the same ones."""
LISTED = "model.pipeline_model_parallel_layout"


@pytest.mark.exhaustive(by=lambda layout: layout)
@pytest.mark.parametrize(
    ("layout", "world_size", "plugins"),
    possible(
        (PP, 2, ()),
        ({"parallel.pipeline_model_parallel_size": 4}, 4, ()),
        ({**PP, **TP}, 4, ()),
        ({**PP, **CP}, 4, EXCHANGE),
        (PP, 4, ()),  # and two data-parallel ranks
        (VPP, 2, ()),
        ({**VPP, "parallel.virtual_pipeline_model_parallel_size": 4, "model.num_layers": 8}, 2, ()),
        ({**VPP, **TP}, 4, ()),
        (VPP, 4, ()),
        ids=["pp2", "pp4", "pp2 tp2", "pp2 cp2", "pp2 dp2", "vpp2", "vpp4", "vpp2 tp2", "vpp2 dp2"],
    ),
)
def test_stages_have_the_gradients_of_one_rank(
    gloo_pool: GlooPool, layout: Mapping[str, Any], world_size: int, plugins: tuple[str, ...]
) -> None:
    values = {**DENSE, **FOUR, "model.num_layers": layout.get("model.num_layers", 4)}
    assert_same(
        outcomes(gloo_pool, {**values, **layout}, world_size, plugins),
        outcomes(gloo_pool, values, 1),
    )


@pytest.mark.exhaustive(by=lambda layout: [LISTED in layout])
@pytest.mark.parametrize(
    "layout",
    [
        {"model.num_layers_in_first_pipeline_stage": 1},
        {"model.num_layers_in_last_pipeline_stage": 1},
        {
            "model.account_for_embedding_in_pipeline_split": True,
            "model.account_for_loss_in_pipeline_split": True,
            "parallel.virtual_pipeline_model_parallel_size": 3,
        },
        {LISTED: "Ettt|tL"},
        {LISTED: "E|tt|tt|L"},
    ],
    ids=["first 1", "last 1", "for embedding and loss", "listed", "listed chunks, two empty"],
)
def test_stages_need_not_be_even(gloo_pool: GlooPool, layout: Mapping[str, Any]) -> None:
    values = {**DENSE, **FOUR}
    assert_same(outcomes(gloo_pool, {**values, **PP, **layout}, 2), outcomes(gloo_pool, values, 1))


@pytest.mark.exhaustive(by=lambda layout: layout)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [(PP, 2), (VPP, 2), ({**PP, **TP}, 4), (PP, 4)],
    ids=["pp", "vpp", "pp tp", "pp dp"],
)
def test_tied_embeddings_get_the_gradients_of_both_ends(
    gloo_pool: GlooPool, layout: Mapping[str, Any], world_size: int
) -> None:
    """``assemble`` compares the copies that the first and the last stage hold."""
    values = {**DENSE, **FOUR, **TIED}
    assert_same(
        outcomes(gloo_pool, {**values, **layout}, world_size), outcomes(gloo_pool, values, 1)
    )


@pytest.mark.exhaustive(by=lambda layout: layout)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ({**PP, "model.moe_layer_freq": [0, 0, 1, 1]}, 2),
        ({**VPP, "model.moe_layer_freq": [0, 1, 0, 1]}, 2),
        ({**PP, **EP}, 4),
        ({**PP, **EP, **TP}, 4),
        ({**VPP, **EP}, 4),
    ],
    ids=["pp, experts on one stage", "vpp", "pp ep", "pp ep tp", "vpp ep"],
)
def test_experts_and_their_routers_losses_on_stages(
    gloo_pool: GlooPool, layout: Mapping[str, Any], world_size: int
) -> None:
    values = {**MOE, **FOUR, **ROUTED, **{k: v for k, v in layout.items() if "freq" in k}}
    assert_same(
        outcomes(gloo_pool, {**values, **layout}, world_size), outcomes(gloo_pool, values, 1)
    )


@pytest.mark.exhaustive(by=lambda options: ["parallel.overlap_p2p_comm" in options])
@pytest.mark.parametrize(
    "options",
    [
        {"parallel.deallocate_pipeline_outputs": True},
        {"parallel.batch_p2p_comm": False},
        {"parallel.variable_seq_lengths": True},
        {**VPP, "parallel.overlap_p2p_comm": True, "parallel.batch_p2p_comm": False},
        {**VPP, "parallel.microbatch_group_size_per_vp_stage": 4},
        {"model.recompute_granularity": "full", "model.recompute_method": "uniform",
         "model.recompute_num_layers": 1},
    ],
    ids=["deallocate", "unbatched", "shapes sent", "overlapped", "groups of 4", "recompute"],
)  # fmt: skip
def test_options_of_the_schedule_change_no_number(
    gloo_pool: GlooPool, options: Mapping[str, Any]
) -> None:
    values = {**DENSE, **FOUR, "train.global_batch_size": 8}
    assert_same(outcomes(gloo_pool, {**values, **PP, **options}, 2), outcomes(gloo_pool, values, 1))
