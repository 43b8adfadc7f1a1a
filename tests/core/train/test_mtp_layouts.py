"""Multi-token prediction in any layout: the gradients and the training of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool

from .trials import CP, EP, PP, TP, VPP, assert_same, assert_trained_alike, outcomes

PLAIN = {**DENSE, "model.num_layers": 4, "model.mtp_num_layers": 2}
TIED = {**PLAIN, "model.share_embeddings_and_output_weights": True}
EXPERTS = {**MOE, "model.mtp_num_layers": 1, "model.moe_aux_loss_coeff": 0.0}
WITHOUT_SP = {"parallel.tensor_model_parallel_size": 2}
SPREAD = {"ddp.use_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("values", "layout", "world_size", "plugins"),
    [
        (PLAIN, TP, 2, ()),
        (TIED, WITHOUT_SP, 2, ()),
        (PLAIN, PP, 2, ()),
        (TIED, VPP, 2, ()),
        (TIED, {**PP, **TP}, 4, ()),
        (PLAIN, {**PP, **CP}, 4, ("ring-attention",)),
        (PLAIN, CP, 2, ("ulysses",)),
        (EXPERTS, EP, 2, ()),
        (EXPERTS, {**EP, **PP}, 4, ()),
    ],
    ids=[
        "tp",
        "tied tp without sp",
        "pp",
        "tied vpp",
        "tied pp tp",
        "pp cp ring",
        "ulysses",
        "ep",
        "ep pp",
    ],
)
def test_mtp_has_the_gradients_of_one_rank(
    gloo_pool: GlooPool,
    values: Mapping[str, Any],
    layout: Mapping[str, Any],
    world_size: int,
    plugins: tuple[str, ...],
) -> None:
    whole = outcomes(gloo_pool, values, 1)
    assert_same(outcomes(gloo_pool, {**values, **layout}, world_size, plugins), whole)


@pytest.mark.parametrize("values", [PLAIN, TIED], ids=["untied", "tied"])
def test_both_copies_of_the_embedding_train_alike(
    gloo_pool: GlooPool, values: Mapping[str, Any]
) -> None:
    """The first and the last stage each hold one; four ranks, so that the optimizer is spread."""
    whole = outcomes(gloo_pool, values, 1, steps=3)
    staged = outcomes(gloo_pool, {**values, **PP, **SPREAD}, 4, steps=3)
    assert_trained_alike(staged, whole)
