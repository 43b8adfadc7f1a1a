"""Which optimizers a run may have, and their bytes in its plan; without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from ascend_run.core.config.layout import layout_of
from ascend_run.core.config.optimizer import optimizer_spec
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import HookError, OptimizerSpec, OptimizerState
from ascend_run.prepare.checks.optimizer import optimizer_problems
from ascend_run.testing.models import DENSE, MOE
from ascend_run.tools.plan.cost_model.estimate import expected_costs
from tests.support.costs import planned
from tests.support.fake_plugins import plugin
from tests.support.tiny_configs import config_with

MUON = OptimizerSpec(build=list, states={"momentum": OptimizerState()}, element_wise=False)


def hooks_of(result: Any) -> Hooks:
    return Hooks([plugin("muon", {"ascend_optimizer": lambda self: result})()])


def problems_of(spec: OptimizerSpec, **values: Any) -> list[str]:
    config = config_with(**values)
    return list(optimizer_problems(config, layout_of(config, 8), hooks_of(spec)))


SPREAD = {"ddp__use_distributed_optimizer": True}
TP = {"parallel__tensor_model_parallel_size": 2}
ETP = {"parallel__expert_tensor_parallel_size": 4}


def test_an_optimizer_of_full_parameters_is_refused_if_sharded() -> None:
    spread, tp, etp = problems_of(MUON, **SPREAD, **TP, **ETP)
    assert "'muon' provides an optimizer that is not element-wise" in spread
    assert "ddp.use_distributed_optimizer=true" in spread
    assert spread.endswith("set it to false")
    assert tp.endswith("parallel.tensor_model_parallel_size=2 shards them; use 1")
    assert etp.endswith("parallel.expert_tensor_parallel_size=4 shards them; use 1")


def test_an_optimizer_is_accepted_where_it_can_run() -> None:
    with_collectives = attrs.evolve(MUON, tensor_parallel=True)
    assert problems_of(MUON) == problems_of(with_collectives, **TP, **ETP) == []
    assert len(problems_of(with_collectives, **TP, **SPREAD)) == 1
    assert problems_of(attrs.evolve(MUON, element_wise=True), **SPREAD, **TP, **ETP) == []
    config = config_with(**SPREAD, **TP)
    assert [*optimizer_problems(config, layout_of(config, 8), Hooks([]))] == []


def test_a_builder_in_place_of_a_spec_is_refused_by_name() -> None:
    with pytest.raises(HookError, match=r"'muon' returned .* expected an OptimizerSpec"):
        optimizer_spec(config_with(), hooks_of(list))


@pytest.mark.parametrize(
    "make",
    [
        lambda: OptimizerState(dtype="float31"),
        lambda: attrs.evolve(MUON, states={"main_param": OptimizerState()}),
        lambda: attrs.evolve(MUON, states={"a/b": OptimizerState()}),
    ],
    ids=["dtype", "reserved name", "name of two"],
)
def test_a_state_that_cannot_be_stored_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"float31|main_param|a/b"):
        make()


@pytest.mark.parametrize(("precision", "masters"), [("fp32", 0), ("bf16", 4)])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "distributed"])
def test_the_plan_counts_the_declared_states(precision: str, masters: int, sharded: bool) -> None:
    """Per parameter a float32 and a bfloat16 state; per tensor a scalar of eight bytes."""
    states = {
        "slow": OptimizerState(),
        "momentum": OptimizerState(dtype="bfloat16"),
        "count": OptimizerState(dtype="int64", scalar=True),
    }
    spec = attrs.evolve(MUON, states=states, element_wise=True)
    values = {"train.precision": precision, "ddp.use_distributed_optimizer": sharded}
    prepared, (plain,) = planned({**DENSE, **values}, world_size=2)
    (cost,) = expected_costs(prepared.config, prepared.layout, hooks_of(spec))
    tensors = len([p for p in cost.rank.parameters if p.trained])
    per_rank = cost.trained_parameters / (2 if sharded else 1)
    assert cost.memory.optimizer == per_rank * (4 + 2 + masters) + tensors * 8
    assert plain.memory.optimizer == per_rank * (8 + masters) + tensors * 4


def test_the_plan_counts_a_state_for_the_parameters_that_have_it() -> None:
    """By names like those of the model, without the layer."""
    asked: dict[str, bool] = {}

    def options_of(name: str, is_matrix: bool) -> dict[str, Any]:
        asked[name] = is_matrix
        return {"moves": "experts" in name.split(".")}

    states = {
        "momentum": OptimizerState(where={"moves": True}),
        "count": OptimizerState(scalar=True, where={"moves": False}),
    }
    spec = attrs.evolve(MUON, states=states, parameter_options=options_of)
    prepared, _ = planned(MOE, world_size=1)
    (cost,) = expected_costs(prepared.config, prepared.layout, hooks_of(spec))
    parameters = cost.rank.parameters
    experts = [p for p in parameters if p.part == "experts"]
    scalars = len(parameters) - len(experts)
    assert cost.memory.optimizer == 4 * sum(p.numel for p in experts) + 4 * scalars
    assert asked == {
        "embedding.word_embeddings": True,
        "input_norm.weight": False,
        "self_attention.linear_proj": True,
        "self_attention.linear_qkv": True,
        "mlp_norm.weight": False,
        "mlp.router.weight": True,
        "mlp.experts.fc1": True,
        "mlp.experts.fc2": True,
        "final_norm.weight": False,
        "output_layer.weight": True,
    }


def test_a_state_of_blocks_has_a_value_for_each() -> None:
    """Of a parameter's last block too, which may be shorter."""
    scales = OptimizerState(block=256)
    assert [scales.nbytes(numel, 1) for numel in (1, 256, 257, 512.5)] == [4, 4, 8, 12]
    with pytest.raises(ValueError, match="block"):
        OptimizerState(block=-1)
