"""Adapters of routed experts, against PEFT's ``target_parameters`` on transformers' Mixtral."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from torch import Tensor

from ascend_run.testing.pool import GlooPool
from tests.support.loaded_model import largest_difference

from .against_peft import TOLERANCE, assert_is_of_peft, of_peft
from .lora_jobs import base_values, reference_logits, run_once
from .peft_models import peft_model, write_latent, write_mixtral, write_peft

ATTENTION: Final = ("q_proj", "o_proj")
OURS: Final = ("linear_q", "linear_proj")
BOTH: Final = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both": (
        {"targets": ATTENTION, "target_parameters": BOTH},
        {"target_modules": [*OURS, "experts"]},
    ),
    "fc1": (
        {"targets": (), "target_parameters": BOTH[:1], "use_rslora": True},
        {"target_modules": ["experts_fc1"], "rslora": True},
    ),
    "fc2": (
        {"targets": ATTENTION, "target_parameters": BOTH[1:]},
        {"target_modules": [*OURS, "experts_fc2"]},
    ),
    "own ranks": (
        {
            "targets": ATTENTION,
            "target_parameters": BOTH,
            "rank_pattern": {BOTH[0]: 2, "q_proj": 3},
            "alpha_pattern": {BOTH[1]: 5},
        },
        {
            "target_modules": [*OURS, "experts"],
            "rank_pattern": {"experts_fc1": 2, "linear_q": 3},
            "alpha_pattern": {"experts_fc2": 5.0},
        },
    ),
}


def mixtral_values(base: str, adapter: str | None, options: dict[str, Any]) -> dict[str, Any]:
    return {
        **base_values(base, adapter, model__family="mixtral"),
        "model.moe_aux_loss_coeff": 0.0,
        **{f"plugins.lora.{name}": value for name, value in options.items()},
    }


def test_a_reference_is_the_base_or_has_what_was_loaded(
    gloo_pool: GlooPool, batch: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    base = write_mixtral(tmp_path / "base")
    model = peft_model(base, targets=(), target_parameters=BOTH)
    adapter = write_peft(model, tmp_path / "adapter")
    values = mixtral_values(base, adapter, {"target_modules": ["experts"]})
    ((changed, off, loaded),) = gloo_pool.run(reference_logits, 1, values, batch[0])
    expected = model(input_ids=batch[0]).logits.detach()
    with model.disable_adapter():
        plain = model(input_ids=batch[0]).logits.detach()
    assert largest_difference(loaded, expected) < TOLERANCE
    assert largest_difference(off, plain) < TOLERANCE
    assert largest_difference(changed, loaded) > 0.01
    assert largest_difference(off, loaded) > 0.01


def test_experts_beside_latent_attention_are_those_of_peft(
    gloo_pool: GlooPool, batch: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    """The first layer is dense."""
    base = write_latent(tmp_path / "base", "deepseek_v2")
    model = peft_model(base, targets=("q_b_proj",), target_parameters=BOTH)
    adapter = write_peft(model, tmp_path / "adapter")
    options = {"target_modules": ["linear_q_up_proj", "experts"]}
    values = {**mixtral_values(base, adapter, options), "model.family": "deepseek_v2"}
    (outcome,) = gloo_pool.run(run_once, 1, values, *batch)
    wanted = of_peft(model, batch)
    assert_is_of_peft(outcome, wanted)
    assert len(wanted.gradients) == 2 * 2 + 4


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.exhaustive(by=lambda case, kernel: [case == "both" and not kernel])
@pytest.mark.parametrize(
    ("case", "kernel"),
    [("both", ()), ("both", ("gmm",)), ("fc1", ()), ("fc2", ("gmm",)), ("own ranks", ())],
    ids=str,
)
def test_logits_and_every_gradient_are_those_of_peft(
    gloo_pool: GlooPool,
    batch: tuple[Tensor, Tensor],
    tmp_path: Path,
    case: str,
    kernel: Sequence[str],
) -> None:
    theirs, ours = CASES[case]
    base = write_mixtral(tmp_path / "base")
    model = peft_model(base, **theirs)
    adapter = write_peft(model, tmp_path / "adapter")
    values = mixtral_values(base, adapter, ours)
    (outcome,) = gloo_pool.run(run_once, 1, values, *batch, ("lora", *kernel))
    assert_is_of_peft(outcome, of_peft(model, batch))
