"""Loss, every gradient and the gradient's norm, in float64: the same however the work is cut."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import differences, full_tensors

from .trials import CP, EP, ETP, EXCHANGE, PP, TP, assert_same, outcomes, possible

SIZE = 8
"""Sequences of the global batch; each leaves out another number of tokens."""

# A loss for balancing experts is one of a micro-batch, so another split is another loss.
MODELS = {
    "dense": {**DENSE, "train.global_batch_size": SIZE},
    "moe": {**MOE, "train.global_batch_size": SIZE, "model.moe_aux_loss_coeff": 0.0},
}
BALANCED = {
    **MOE,
    "train.global_batch_size": 2,
    "train.micro_batch_size": 2,
    "model.moe_aux_loss_coeff": 0.1,
    "model.moe_z_loss_coeff": 0.05,
}
"""One micro-batch, and both losses of the router."""


@pytest.mark.exhaustive(
    by=lambda model, micro_batch_size, world_size: enumerate([model, micro_batch_size, world_size])
)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("micro_batch_size", "world_size"),
    [(1, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4)],
    ids=lambda size: str(size),
)
def test_a_global_batch_may_be_split_any_way(
    gloo_pool: GlooPool, model: str, micro_batch_size: int, world_size: int
) -> None:
    values = MODELS[model]
    whole = outcomes(gloo_pool, {**values, "train.micro_batch_size": SIZE}, 1)
    split = {**values, "train.micro_batch_size": micro_batch_size}
    assert_same(outcomes(gloo_pool, split, world_size), whole)


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_experts_may_be_spread_over_the_ranks(gloo_pool: GlooPool, micro_batch_size: int) -> None:
    values = MODELS["moe"]
    whole = outcomes(gloo_pool, {**values, "train.micro_batch_size": SIZE}, 1)
    spread = {**values, **EP, "train.micro_batch_size": micro_batch_size}
    assert_same(outcomes(gloo_pool, spread, 2), whole)


@pytest.mark.exhaustive(by=lambda layout: layout)
@pytest.mark.parametrize(
    ("layout", "world_size", "plugins"),
    possible(
        (TP, 2, ()),
        ({**TP, **EP}, 2, ()),
        (CP, 2, EXCHANGE),
        ({**CP, **EP}, 2, EXCHANGE),
        ({**CP, **TP}, 4, EXCHANGE),
        ids=["tp", "tp ep", "cp", "cp ep", "cp tp"],
    ),
)
def test_the_routers_losses_are_of_the_whole_sequence(
    gloo_pool: GlooPool, layout: Mapping[str, int], world_size: int, plugins: tuple[str, ...]
) -> None:
    whole = outcomes(gloo_pool, BALANCED, 1)
    assert_same(outcomes(gloo_pool, {**BALANCED, **layout}, world_size, plugins), whole)


def test_the_routers_losses_do_change_the_gradients(gloo_pool: GlooPool) -> None:
    """Or the test before compared nothing."""
    without = {**BALANCED, "model.moe_aux_loss_coeff": 0.0, "model.moe_z_loss_coeff": None}
    found = [full_tensors(outcomes(gloo_pool, v, 1)).tensors for v in (BALANCED, without)]
    assert len(list(differences(*found, 1e-3))) > 10


def test_router_losses_are_averaged_over_data_parallel_ranks(
    gloo_pool: GlooPool,
) -> None:
    """Two micro-batches on one rank, or one on each of two."""
    values = {**BALANCED, "train.global_batch_size": 4}
    assert_same(outcomes(gloo_pool, values, 2), outcomes(gloo_pool, values, 1))


@pytest.mark.exhaustive(by=lambda layout, dispatcher: (dispatcher, *layout))
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        (EP, 2),
        (ETP, 2),
        ({**ETP, **TP}, 2),
        ({**ETP, **EP}, 4),
        ({**ETP, **EP, **TP}, 4),
        ({**EP, **TP}, 4),
        ({**ETP, **PP, **TP}, 4),
    ],
    ids=["ep", "etp", "etp tp", "etp ep", "etp ep tp", "ep tp dp", "etp pp tp"],
)
def test_experts_are_sharded_with_every_token_dispatcher(
    gloo_pool: GlooPool, layout: Mapping[str, int], world_size: int, dispatcher: str
) -> None:
    values = {**MODELS["moe"], "model.moe_shared_expert_intermediate_size": 16}
    one = outcomes(gloo_pool, values, 1)
    options = {**layout, "model.moe_token_dispatcher_type": dispatcher}
    several = outcomes(gloo_pool, {**values, **options}, world_size)
    assert_same(several, one)
    if {*EP} <= {*layout}:
        exchanges = [any("alltoall" in name for name in o.collectives) for o in several]
        assert exchanges == [dispatcher == "alltoall"] * world_size


@pytest.mark.parametrize("layout", possible((TP,), (CP,), ids=["tp", "cp"]))
def test_dense_gradients_do_not_depend_on_tensor_or_context_parallelism(
    gloo_pool: GlooPool, layout: Mapping[str, int]
) -> None:
    options = {
        "model.qk_layernorm": True,
        "model.normalization": "LayerNorm",
        "model.share_embeddings_and_output_weights": True,
        "model.add_qkv_bias": True,
    }
    values = {**MODELS["dense"], **options}
    plugins = EXCHANGE if layout is CP else ()
    whole = outcomes(gloo_pool, values, 1)
    assert_same(outcomes(gloo_pool, {**values, **layout}, 2, plugins), whole)


SHARED = {"model.qk_layernorm": True, "model.add_qkv_bias": True, "model.softmax_type": "learnable"}
TP4 = {"parallel.tensor_model_parallel_size": 4}


@pytest.mark.exhaustive(by=lambda plugins: [] if plugins else ["plain"])
@pytest.mark.parametrize(
    ("layout", "groups", "plugins"),
    [
        pytest.param({**TP, **TP4}, 2, (), id="sequence parallel"),
        pytest.param(TP4, 2, (), id="two groups"),
        pytest.param(TP4, 1, (), id="one group"),
        *(
            pytest.param({**TP, **CP}, 1, (name,), id=name, marks=pytest.mark.needs_plugins(name))
            for name in ("ulysses", "ring-attention")
        ),
    ],
)
def test_ranks_that_share_key_value_heads_have_the_gradients_of_one(
    gloo_pool: GlooPool, layout: Mapping[str, int], groups: int, plugins: tuple[str, ...]
) -> None:
    values = {**MODELS["dense"], **SHARED, "model.num_query_groups": groups}
    whole = outcomes(gloo_pool, values, 1)
    several = outcomes(gloo_pool, {**values, **layout}, 4, plugins)
    assert_same(several, whole)


SWITCHES = {
    **MODELS["dense"],
    "model.add_qkv_bias": True,
    "model.add_linear_proj_bias": True,
    "model.add_mlp_bias": True,
    "model.norm_placement": "both",
    "model.scale_embedding": True,
    "model.residual_multiplier": 0.5,
    "model.logits_scaling": 2.0,
    "model.attn_logit_softcapping": 2.0,
    "model.softmax_type": "learnable",
    "model.log_n_scaling_length": 4,
    "model.final_logit_softcapping": 1.0,
    "model.window_size": [5, 0],
    "model.window_attn_skip_freq": 2,
    "model.share_embeddings_and_output_weights": True,
}


@pytest.mark.exhaustive(by=lambda layout: layout)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    possible((TP, 2), (PP, 2), (CP, 2), ({**TP, **PP}, 4), ids=["tp", "pp", "cp", "tp pp"]),
)
def test_switches_of_the_model_do_not_depend_on_the_layout(
    gloo_pool: GlooPool, layout: Mapping[str, int], world_size: int
) -> None:
    plugins = EXCHANGE if layout is CP else ()
    whole = outcomes(gloo_pool, SWITCHES, 1)
    assert_same(outcomes(gloo_pool, {**SWITCHES, **layout}, world_size, plugins), whole)
