"""Runs with muon: against the oracle, in other layouts, resumed and planned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ascend_run.core.hooks import Hooks
from ascend_run.prepare.checks.optimizer import optimizer_problems
from ascend_run.testing.models import DENSE, MODELS, MOE
from ascend_run.testing.oracle.known import unknown
from ascend_run.testing.parity import TRAINED_TOLERANCE, Parity, compare
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from ascend_run.testing.tensors import full_tensors
from ascend_run.tools.plan.cost_model.estimate import expected_costs
from ascend_run.tools.verify.oracle import compared_with_oracle, oracle_record
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.ranks import PoolRanks
from ascend_run.tools.verify.sides import sides_of
from tests.core.train.runs import Runs
from tests.support.communication import differences
from tests.support.optimizer_runs import loaded, saved, stepwise, unknown_names
from tests.support.small_runs import prepare

NAME: Final = ("muon",)
FLOAT32: Final = {"plugins.muon.ns_dtype": "float32"}
BF16: Final = {"train.precision": "bf16"}
TP: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
PP: Final = {"parallel.pipeline_model_parallel_size": 2}
EP: Final = {"parallel.expert_model_parallel_size": 2}


@pytest.mark.exhaustive(by=lambda model: [model] if model == "moe" else [])
@pytest.mark.parametrize(
    ("model", "config"),
    [
        pytest.param("dense", {"plugins.muon.nesterov": False}, id="dense"),
        pytest.param(
            "moe",
            {
                "plugins.muon.scale_mode": "shape_scaling",
                "plugins.muon.lr_multiplier": 2.0,
                "plugins.muon.adamw": ["router", "linear_proj"],
                "model.moe_shared_expert_intermediate_size": 24,
                "model.moe_shared_expert_gate": True,
            },
            id="moe",
        ),
    ],
)
def test_a_run_has_the_losses_and_weights_of_the_oracle(
    gloo_pool: GlooPool, model: str, config: Mapping[str, Any]
) -> None:
    """The iterations of a run against polynomials of the singular values, in float64."""
    question = Question(enable=NAME, layout={}, model=model, config={**FLOAT32, **config})
    sides = sides_of(question)
    assert not sides.unknown
    plain = PoolRanks(gloo_pool)(sides.plain, None)
    expected = [oracle_record(sides.plain.prepare(), plain[0], sides.plain.steps)]
    _, comparison = compared_with_oracle(sides.plain, plain, expected)
    assert [check for check in comparison.checks if not check.passed] == []
    assert {check.name for check in comparison.checks} >= {"gradients", "parameter groups"}


def test_iterations_in_bfloat16_are_unknown_to_the_oracle() -> None:
    for dtype, found in (("bfloat16", ["plugins.muon.ns_dtype=bfloat16"]), ("float32", [])):
        values = {**DENSE, "plugins.muon.ns_dtype": dtype}
        assert [*unknown(prepare(values, NAME).config)] == found


@pytest.mark.exhaustive(by=lambda model, layout: [model, *layout])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("moe", {"tp": 4, "ep": 2, "expt_tp": 2}),
        ("moe", {"tp": 2, "dp": 2, "ep": 2}),
        ("moe", {"dp": 2, "ep": 2}),
        ("dense", {"pp": 2, "vpp": 2}),
        ("dense", {"dp": 2}),
        ("dense", {"tp": 2}),
        ("dense", {"tp": 4}),
    ],
    ids=str,
)
def test_a_layout_changes_rounding_alone(
    parity: Parity, model: str, layout: Mapping[str, int]
) -> None:
    config = {"model.num_layers": 4} if "pp" in layout else {}
    parity(NAME, model=model, layout=layout, config=config, options=FLOAT32)


def test_ranks_with_whole_sequences_change_rounding_alone(gloo_pool: GlooPool) -> None:
    """Tensor parallelism without sequence parallelism."""
    sharded = {"parallel.tensor_model_parallel_size": 2}
    got, want = (
        gloo_pool.run(
            run_trial, ranks, Trial(plugins=NAME, config={**DENSE, **FLOAT32, **layout}, steps=5)
        )
        for ranks, layout in ((2, sharded), (1, {}))
    )
    assert [*compare(got, want, TRAINED_TOLERANCE)] == []


@pytest.mark.exhaustive(by=lambda ns_dtype: ())
@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "more"),
    [
        pytest.param("dense", {}, id="dense"),
        pytest.param(
            "moe",
            {"parallel.expert_tensor_parallel_size": 2, "model.num_moe_experts": 16},
            id="moe",
        ),
    ],
)
def test_plan_counts_the_momentum_that_ranks_gather(
    gloo_pool: GlooPool, model: str, more: Mapping[str, Any], ns_dtype: str
) -> None:
    longer = {"data.seq_length": 64}  # what is counted is more than a few numbers
    values = {**MODELS[model], **TP, **more, **longer, "plugins.muon.ns_dtype": ns_dtype}
    assert differences(gloo_pool, values, NAME) == []


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param(DENSE, 1, id="fp32"),
        pytest.param({**MOE, **BF16, **EP}, 2, id="bf16 moe ep2"),
    ],
)
def test_plan_counts_the_states_that_the_ranks_hold(
    gloo_pool: GlooPool, values: Mapping[str, Any], ranks: int
) -> None:
    """Four bytes for an element of a matrix and eight for another; and the master weights."""
    found = gloo_pool.run(stepwise, ranks, values, NAME, 1, timeout=100)
    prepared = prepare(values, NAME, ranks)
    (cost,) = expected_costs(prepared.config, prepared.layout, Hooks(prepared.instances()))
    assert {one.state_bytes for one in found} == {cost.memory.optimizer}
    plain = prepare(values, (), ranks)
    (adamw,) = expected_costs(plain.config, plain.layout, Hooks(plain.instances()))
    matrices = [
        p
        for p in cost.rank.parameters
        if p.is_matrix and p.part not in ("embedding", "output_layer")
    ]
    saved_bytes = sum(4 * p.numel + 4 for p in matrices)
    assert adamw.memory.optimizer - cost.memory.optimizer == saved_bytes > 0


@pytest.mark.exhaustive(by=lambda split: ())
@pytest.mark.parametrize("split", [PP, TP], ids=["stages", "shards"])
def test_states_are_loaded_in_another_layout(
    gloo_pool: GlooPool, tmp_path: Path, split: Mapping[str, Any]
) -> None:
    """Bitwise: weights, master weights and every state; from two stages, or shards, to one rank."""
    values = {**MOE, **BF16, "model.num_layers": 4}
    want, got = (
        full_tensors(gloo_pool.run(job, size, {**values, **layout}, NAME, str(tmp_path)))
        for job, layout, size in ((saved, {**split, **EP}, 4), (loaded, {}, 1))
    )
    assert got.problems() == want.problems() == []
    assert got.tensors.keys() == want.tensors.keys()
    assert [key for key, t in want.tensors.items() if not torch.equal(got.tensors[key], t)] == []
    states = {key.split("/")[1] for key in want.tensors if key.startswith("optimizer/")}
    assert states == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step", "main_param"}


@pytest.mark.exhaustive(by=lambda values: values)
@pytest.mark.parametrize(
    ("values", "ranks"),
    [pytest.param({**DENSE, **BF16}, 1, id="bf16"), pytest.param({**MOE, **EP}, 2, id="moe ep2")],
)
def test_a_stopped_run_resumes_bitwise(
    gloo_pool: GlooPool, tmp_path: Path, values: Mapping[str, Any], ranks: int
) -> None:
    Runs(gloo_pool, tmp_path, ({**values}, ranks, NAME)).assert_the_same_in_two_halves()


def test_ranges_of_parameters_are_refused() -> None:
    sharding = {**TP, "parallel.expert_tensor_parallel_size": 2}
    for key, count in ((sharding, 0), ({**sharding, "ddp.use_distributed_optimizer": True}, 1)):
        prepared = prepare({**MOE, **key}, (), 4)
        hooks = Hooks(prepare(MOE, NAME).instances())
        found = [*optimizer_problems(prepared.config, prepared.layout, hooks)]
        assert len(found) == count
        assert all("'muon' provides an optimizer that is not element-wise" in one for one in found)


def test_a_name_of_no_parameter_is_logged(gloo_pool: GlooPool) -> None:
    option = "plugins.muon.adamw"
    for names, logged in (
        (["linear_fc2"], []),
        (["lin_porj", "linear_fc2"], [(option, ["lin_porj"], ["linear_proj"])]),
    ):
        (found,) = gloo_pool.run(unknown_names, 1, {**DENSE, option: names}, NAME, timeout=100)
        assert found == logged
