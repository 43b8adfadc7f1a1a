"""Runs with low-precision-optimizer: planned, resumed, and interchanged with AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ascend_run.core.hooks import Hooks
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from ascend_run.tools.plan.cost_model.estimate import expected_costs
from tests.core.train.runs import Runs
from tests.support.optimizer_runs import held_bytes, loaded, saved, stepwise, unknown_names
from tests.support.small_runs import prepare

NAME: Final = ("low-precision-optimizer",)
BF16: Final = {"train.precision": "bf16"}
DISTRIBUTED: Final = {"ddp.use_distributed_optimizer": True}
TP: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
EP: Final = {"parallel.expert_model_parallel_size": 2}


@pytest.mark.exhaustive(by=lambda values, ranks: [*({*values} & {*DISTRIBUTED}), ranks])
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({**DENSE, **BF16}, 1, id="dense"),
        pytest.param({**MOE, **EP}, 2, id="moe ep2"),
        pytest.param({**DENSE, **BF16, **DISTRIBUTED}, 2, id="distributed"),
    ],
)
def test_plan_counts_the_states_that_the_ranks_hold(
    gloo_pool: GlooPool, values: Mapping[str, Any], ranks: int
) -> None:
    """About a quarter of AdamW's for the matrices; a range of a distributed optimizer rounds up to
    a block."""
    held = sum(gloo_pool.run(held_bytes, ranks, values, NAME, timeout=100))
    cost = {}
    for names in (NAME, ()):
        prepared = prepare(values, names, ranks)
        hooks = Hooks(prepared.instances())
        (cost[names],) = expected_costs(prepared.config, prepared.layout, hooks)
    is_spread = "ddp.use_distributed_optimizer" in values
    slack = 24 * len(cost[NAME].rank.parameters) if is_spread else 0
    assert abs(held - ranks * cost[NAME].memory.optimizer) <= slack
    masters = 4 * cost[()].trained_parameters / (ranks if is_spread else 1)
    masters = masters if values["train.precision"] == "bf16" else 0.0
    ours, adamw = (cost[names].memory.optimizer - masters for names in (NAME, ()))
    assert 0.25 < ours / adamw < 0.27


def test_a_checkpoint_is_that_of_adamw(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Names, shapes and dtypes; each loads that of the other, in another layout."""
    values = {**DENSE, **BF16, "model.num_layers": 4}
    for writer, reader in ((NAME, ()), ((), NAME)):
        folder = str(tmp_path / f"by {writer}")
        begun, resumed = {**values, **TP, **DISTRIBUTED}, {**values, **DISTRIBUTED}
        want = full_tensors(gloo_pool.run(saved, 4, begun, writer, folder))
        got = full_tensors(gloo_pool.run(loaded, 2, resumed, reader, folder))
        assert want.problems() == got.problems() == []
        assert got.tensors.keys() == want.tensors.keys()
        apart = [k for k, t in want.tensors.items() if not torch.equal(got.tensors[k], t)]
        assert apart == []
        states = {key.split("/")[1] for key in want.tensors if key.startswith("optimizer/")}
        assert states == {"step", "exp_avg", "exp_avg_sq", "main_param"}


@pytest.mark.exhaustive(by=lambda values: values)
@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        pytest.param({**DENSE, **BF16}, 1, id="bf16"),
        pytest.param({**MOE, **BF16, **EP, **DISTRIBUTED}, 2, id="moe ep2 distributed"),
    ],
)
def test_a_stopped_run_resumes_bitwise(
    gloo_pool: GlooPool, tmp_path: Path, values: Mapping[str, Any], ranks: int
) -> None:
    Runs(gloo_pool, tmp_path, (values, ranks, NAME)).assert_the_same_in_two_halves()


def test_a_name_of_no_parameter_is_logged_once(gloo_pool: GlooPool) -> None:
    """Of all stages, the first one has the embedding, the last one the output layer."""
    option = "plugins.low-precision-optimizer.float32"
    values = {**DENSE, "parallel.pipeline_model_parallel_size": 2}
    values[option] = ["embedding", "emebdding", "output_layer", "linear_fc1"]
    first, last = gloo_pool.run(unknown_names, 2, values, NAME, timeout=100)
    assert first == [(option, ["emebdding"], ["embedding"])]
    assert last == []


def test_matrices_move_as_by_adamw(gloo_pool: GlooPool) -> None:
    """By a few percent of their movement elsewhere."""
    values = {**DENSE, "optimizer.lr": 0.01, "optimizer.lr_decay_style": "constant"}
    found = []
    for names in (NAME, ()):
        (one,) = gloo_pool.run(stepwise, 1, values, names, 8, timeout=100)
        found.append([full_tensors([one.outcomes[at]]).tensors for at in (0, -1)])
    (start, ours), (same, adamw) = found
    for key, weight in start.items():
        if key.startswith("model/"):
            assert torch.equal(weight, same[key])
            apart = float((ours[key] - adamw[key]).norm() / (adamw[key] - weight).norm())
            assert 0 < apart < 0.05 or weight.ndim == 1


BLOCKS: Final[Mapping[str, Any]] = {
    **DENSE,
    **BF16,
    "model.num_layers": 1,
    "model.hidden_size": 256,
    "model.ffn_hidden_size": 255,  # so that half of all elements is a whole number of blocks
    "model.vocab_size": 96,
    "optimizer.clip_grad": 0.0,  # the norm is summed in another order
}
"""Every parameter, and every range of a distributed optimizer on two ranks, has full blocks."""


def test_a_distributed_optimizer_updates_like_a_replicated_one(gloo_pool: GlooPool) -> None:
    """Bitwise: weights, master weights and moments after each step."""
    found = []
    for ddp in ({}, DISTRIBUTED):
        ranks = gloo_pool.run(stepwise, 2, {**BLOCKS, **ddp}, NAME, 3, timeout=100)
        assert any(rank.has_parts for rank in ranks) == bool(ddp)
        found.append([full_tensors([rank.outcomes[at] for rank in ranks]) for at in range(4)])
    for got, want in zip(*found, strict=True):
        assert got.problems() == want.problems() == []
        assert got.tensors.keys() == want.tensors.keys()
        apart = [k for k, tensor in want.tensors.items() if not torch.equal(got.tensors[k], tensor)]
        assert apart == []


def test_tied_embeddings_of_two_stages_stay_equal(gloo_pool: GlooPool) -> None:
    """Both copies are quantized alike, although each stage has its own distributed optimizer."""
    values = {
        **DENSE,
        **BF16,
        **DISTRIBUTED,
        "parallel.pipeline_model_parallel_size": 2,
        "model.share_embeddings_and_output_weights": True,
    }
    ranks = gloo_pool.run(stepwise, 4, values, NAME, 4, timeout=100)
    found = full_tensors([rank.outcomes[-1] for rank in ranks])
    assert found.problems() == []  # replicas that differ are one
