"""Shared experts by their number, against a formula and against the fields of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.plugins.experts.shared_experts import SharedExperts
from ascend_run.prepare.config.printing import render_toml
from ascend_run.prepare.config.reading import raw_of_toml
from ascend_run.prepare.hugging_face.config_keys import config_to_hf
from ascend_run.prepare.prepare import prepare_raw
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.parity import Case, Parity, compare
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.convert.model_config import load_family
from tests.core.train.runs import Runs
from tests.support.communication import differences
from tests.support.costs import planned
from tests.support.needed_plugins import case
from tests.support.small_runs import prepare, standing_model
from tests.support.tiny_families import model_values
from tests.support.tiny_options import planned_with

NAME = "shared-experts"
OPTION: Final = f"plugins.{NAME}."
WIDTH: Final = "model.moe_shared_expert_intermediate_size"
GATE, OVERLAP = "model.moe_shared_expert_gate", "model.moe_shared_expert_overlap"
TWO: Final = {f"{OPTION}count": 2, f"{OPTION}gate": True}
BY_HAND: Final = {WIDTH: 96, GATE: True}
"""Of experts that are 48 wide."""
EXPERTS = ("model.family=mixtral", "model.num_moe_experts=4", "model.moe_router_topk=2")
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def gated(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    gate, up = (x @ fc1.t()).chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up) @ fc2.t()


@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("plugins", [(), case(("gmm",))], ids=["one by one", "grouped"])
def test_output_and_every_gradient_are_those_of_the_formula(
    gate: bool, plugins: tuple[str, ...]
) -> None:
    """Routed experts by their weights, and the shared ones by their gate."""
    values = {**MOE, **TWO, f"{OPTION}gate": gate, "model.moe_aux_loss_coeff": 0.0}
    with standing_model(values, enable=(NAME, *plugins)) as model:
        moe = model.decoder.layers[0].mlp
        shared = moe.shared_experts
        assert shared.linear_fc1.weight.shape == (2 * 96, 32)
        weights = [shared.linear_fc1.weight, shared.linear_fc2.weight]
        generator = torch.Generator().manual_seed(4)
        x = torch.randn((16, 2, 32), dtype=torch.float64, generator=generator).requires_grad_()
        got, _ = moe(x)
        tokens, router = x.flatten(0, 1), moe.router.weight
        best = (tokens @ router.t()).topk(2, -1)
        parts = []
        for token, own, chosen in zip(
            tokens, best.values.softmax(-1), best.indices.tolist(), strict=True
        ):
            out = gated(token, *weights)
            if gate:
                out = out / (1 + (-(shared.gate_weight[0] @ token)).exp())
            for share, n in zip(own, chosen, strict=True):
                out = out + share * gated(token, moe.experts.fc1[n], moe.experts.fc2[n])
            parts.append(out)
        wanted = torch.stack(parts).view_as(x)
        torch.testing.assert_close(got, wanted, **CLOSE)
        inputs = [x, *moe.parameters()]
        assert len(inputs) == (7 if gate else 6)
        dout = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        ours, formula = (torch.autograd.grad(y, inputs, dout) for y in (got, wanted))
        for gradient, right in zip(ours, formula, strict=True):
            assert right.any()
            torch.testing.assert_close(gradient, right, **CLOSE)


@pytest.mark.exhaustive(by=lambda beside, layout: (*beside, *layout))
@pytest.mark.parametrize(
    ("beside", "layout", "options"),
    [
        ((), {"tp": 2}, TWO),
        ((), {"tp": 2, "dp": 2, "ep": 2}, TWO),
        ((), {"tp": 2, "dp": 2, "ep": 2, "expt_tp": 2}, TWO),
        case(("moe-alltoall",), {"dp": 2, "ep": 2}, {**TWO, f"{OPTION}overlap": True}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_rank(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int], options: dict[str, Any]
) -> None:
    parity(NAME, beside=beside, model="moe", layout=layout, options=options)


@pytest.mark.exhaustive(by=lambda layout, steps: [steps] if steps and not layout else [])
@pytest.mark.parametrize("layout", [{}, {"tp": 2, "dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("steps", [0, 5])
def test_it_is_bitwise_the_model_whose_fields_are_set_one_by_one(
    parity: Parity, layout: dict[str, int], steps: int
) -> None:
    mine = Case(plugins=(NAME,), model="moe", layout=layout, options=TWO)
    plain = Case(plugins=(), model="moe", layout=layout, config=BY_HAND)
    ours, theirs = (parity.outcomes(case, steps=steps) for case in (mine, plain))
    assert [*compare(ours, theirs, 0.0)] == []
    assert [rank.operations for rank in ours] == [rank.operations for rank in theirs]
    names = {shard.name.split(".mlp.")[-1] for rank in ours for shard in rank.shards}
    assert {name for name in names if name.startswith("shared")} == {
        f"shared_experts.{name}"
        for name in ("linear_fc1.weight", "linear_fc2.weight", "gate_weight")
    }


def test_the_plan_names_the_values_and_the_plugin_that_they_are_of() -> None:
    prepared = planned_with(NAME, *EXPERTS, f"{OPTION}count=3", f"{OPTION}overlap=true")
    model = prepared.config.model
    assert model.moe_shared_expert_intermediate_size == 3 * 48
    assert (model.moe_shared_expert_overlap, model.moe_shared_expert_gate) == (True, False)
    origins = prepared.plan.origins
    assert {origins[WIDTH], origins[OVERLAP]} == {f"plugin '{NAME}'"}
    assert origins[GATE] == "Megatron's default"
    narrow = planned_with(NAME, *EXPERTS, "model.moe_ffn_hidden_size=16")
    assert narrow.config.model.moe_shared_expert_intermediate_size == 16


def test_a_resolved_config_is_read_again_with_the_plugin_and_as_it_is() -> None:
    prepared = planned_with(NAME, *EXPERTS, f"{OPTION}count=3", f"{OPTION}gate=true")
    text = render_toml(prepared.resolved)
    assert f"moe_shared_expert_intermediate_size = 144  # plugin '{NAME}'" in text
    assert prepare_raw(raw_of_toml(text, "config.toml")).config == prepared.config


def test_a_width_that_disagrees_is_refused_and_one_that_agrees_is_not() -> None:
    with pytest.raises(AscendRunError) as refused:
        planned_with(NAME, *EXPERTS, f"{WIDTH}=24", f"{GATE}=false", f"{OPTION}gate=true")
    assert refused.value.problems == (
        f"{WIDTH}=24, but {OPTION}count=1 of width 48 makes it 48; leave one of them out",
        f"{GATE}=false, but {OPTION}gate=true makes it true; leave one of them out",
    )
    agreed = planned_with(NAME, *EXPERTS, f"{WIDTH}=96", f"{OPTION}count=2")
    assert agreed.plan.origins[WIDTH] == "command line"
    with pytest.raises(AscendRunError, match=r"count=0 must be >= 1"):
        planned_with(NAME, *EXPERTS, f"{OPTION}count=0")


def test_a_dense_model_is_left_alone() -> None:
    assert SharedExperts.manifest.numerics is Numerics.MODEL
    prepared = planned_with(NAME)
    assert {*prepared.plan.idle} == {NAME}
    assert prepared.config.model.moe_shared_expert_intermediate_size is None
    assert prepare(DENSE, (NAME,)).config.model == prepare(DENSE).config.model


def test_memory_flops_and_communication_are_those_of_the_fields(gloo_pool: GlooPool) -> None:
    layout = {"parallel.expert_model_parallel_size": 2, "parallel.tensor_model_parallel_size": 2}
    split = {**MOE, **layout, "parallel.sequence_parallel": True}
    _, mine = planned({**split, **TWO}, (NAME,), 4)
    _, plain = planned({**split, **BY_HAND}, (), 4)
    assert mine == plain
    longer = {"data.seq_length": 64, "model.num_moe_experts": 16}  # more than a few numbers
    assert differences(gloo_pool, {**split, **longer, **TWO}, (NAME,)) == []


def test_a_run_in_two_halves_is_the_run_in_one(gloo_pool: GlooPool, tmp_path: Path) -> None:
    Runs(gloo_pool, tmp_path, ({**MOE, **TWO}, 1, (NAME,))).assert_the_same_in_two_halves()


def test_an_export_has_their_number_where_the_family_has_a_place_for_it() -> None:
    values = {**model_values("deepseek_v2"), f"{OPTION}count": 2}
    del values[WIDTH]
    config = prepare({**values, "data.seq_length": 16}, (NAME,)).config
    assert config_to_hf(load_family("deepseek_v2"), config)["n_shared_experts"] == 2
    with pytest.raises(AscendRunError, match=f"{WIDTH} is 96"):
        config_to_hf(load_family("mixtral"), prepare({**MOE, **TWO}, (NAME,)).config)
