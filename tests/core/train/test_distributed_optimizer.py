"""The optimizer's state sharded over data-parallel ranks, and communication that overlaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool

from .gather_jobs import output_weight_when_read
from .trials import (
    CP,
    EP,
    ETP,
    EXCHANGE,
    PP,
    STEPS,
    TP,
    VPP,
    assert_same,
    assert_trained_alike,
    outcomes,
    possible,
)

FOUR = {"model.num_layers": 4, "train.global_batch_size": 8}
DISTRIBUTED = {"ddp.use_distributed_optimizer": True}
REDUCED = {"ddp.overlap_grad_reduce": True, "ddp.bucket_size": 4000}
OVERLAPPED = {**DISTRIBUTED, **REDUCED, "ddp.overlap_param_gather": True}
"""Several buckets on the first stage."""
ONE_STAGE = {"model.moe_layer_freq": [0, 0, 1, 1]}
TIED = {"model.share_embeddings_and_output_weights": True}


@pytest.mark.exhaustive(by=lambda layout, ddp: (*ddp, *({*layout} & {*VPP, *CP})))
@pytest.mark.parametrize(
    ("layout", "world_size", "plugins", "ddp"),
    possible(
        ({}, 2, (), DISTRIBUTED),
        ({}, 2, (), REDUCED),
        ({}, 2, (), OVERLAPPED),
        (TP, 4, (), OVERLAPPED),
        (PP, 4, (), OVERLAPPED),
        (VPP, 4, (), {}),
        (VPP, 4, (), OVERLAPPED),
        (CP, 4, EXCHANGE, OVERLAPPED),
        ids=[
            "dp2-sharded",
            "dp2-reduced",
            "dp2-all",
            "tp2 dp2-all",
            "pp2 dp2-all",
            "vpp2 dp2-plain",
            "vpp2 dp2-all",
            "cp2 dp2-all",
        ],
    ),
)
def test_training_comes_to_the_weights_of_one_rank(
    gloo_pool: GlooPool,
    layout: Mapping[str, Any],
    world_size: int,
    plugins: tuple[str, ...],
    ddp: Mapping[str, Any],
) -> None:
    values = {**DENSE, **FOUR}
    several = outcomes(gloo_pool, {**values, **layout, **ddp}, world_size, plugins, STEPS)
    assert_trained_alike(several, outcomes(gloo_pool, values, 1, (), STEPS))


@pytest.mark.exhaustive(by=lambda layout, ddp: (*layout, *ddp))
@pytest.mark.parametrize(
    ("layout", "world_size", "ddp"),
    [
        (EP, 2, DISTRIBUTED),
        (EP, 4, OVERLAPPED),
        ({**TP, **ETP}, 4, DISTRIBUTED),
        ({**EP, **PP, **ONE_STAGE}, 4, DISTRIBUTED),
        ({**VPP, **EP, **ONE_STAGE}, 4, OVERLAPPED),
    ],
    ids=[
        "ep-sharded",
        "ep dp-all",
        "tp etp-sharded",
        "ep, experts on one stage-sharded",
        "vpp ep-all",
    ],
)
def test_experts_train_to_the_weights_of_one_rank(
    gloo_pool: GlooPool, layout: Mapping[str, Any], world_size: int, ddp: Mapping[str, Any]
) -> None:
    frequency = {k: v for k, v in layout.items() if "freq" in k}
    values = {**MOE, **FOUR, **frequency, "model.moe_aux_loss_coeff": 0.05}
    several = outcomes(gloo_pool, {**values, **layout, **ddp}, world_size, (), STEPS)
    assert_trained_alike(several, outcomes(gloo_pool, values, 1, (), STEPS))


@pytest.mark.exhaustive(by=lambda layout, ddp: (*layout, *ddp))
@pytest.mark.parametrize(
    ("layout", "world_size", "ddp"),
    [(PP, 2, DISTRIBUTED), (VPP, 4, {}), (VPP, 4, OVERLAPPED)],
    ids=["pp-sharded", "vpp dp-plain", "vpp dp-all"],
)
def test_tied_embeddings_stay_tied(
    gloo_pool: GlooPool, layout: Mapping[str, Any], world_size: int, ddp: Mapping[str, Any]
) -> None:
    """Bitwise: ``assemble`` lets no copies differ."""
    values = {**DENSE, **FOUR, **TIED}
    several = outcomes(gloo_pool, {**values, **layout, **ddp}, world_size, (), STEPS)
    assert_trained_alike(several, outcomes(gloo_pool, values, 1, (), STEPS))


@pytest.mark.parametrize("ddp", [REDUCED, OVERLAPPED], ids=["reduced", "all"])
def test_what_overlaps_reduces_the_same_gradients(
    gloo_pool: GlooPool, ddp: Mapping[str, Any]
) -> None:
    values = {**DENSE, **FOUR}
    several = outcomes(gloo_pool, {**values, **VPP, **ddp}, 4)
    assert_same(several, outcomes(gloo_pool, values, 1))


def test_the_loss_reads_the_output_weight_when_it_is_gathered(gloo_pool: GlooPool) -> None:
    """The loss calls no module that would wait, and no other weight is in the bucket."""
    values = {**DENSE, **OVERLAPPED, "ddp.bucket_size": 3000, "train.global_batch_size": 4}
    for sharing, over in gloo_pool.run(output_weight_when_read, 2, values, timeout=100):
        assert (sharing, over) == (1, [True] * 4)


def test_each_rank_gathers_and_scatters_where_it_would_reduce(gloo_pool: GlooPool) -> None:
    values = {**DENSE, **FOUR}
    plain, sharded = (outcomes(gloo_pool, {**values, **d}, 2, (), 2)[0] for d in ({}, DISTRIBUTED))
    names = {name for name in sharded.collectives if name not in plain.collectives}
    assert any("reduce_scatter" in name for name in names), sharded.collectives
    assert any("allgather" in name for name in names), sharded.collectives
