"""Tasks that train a model with experts, with the losses of its routers: means over the routed
tokens, and each layout is one rank. In float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.testing.models import MOE
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.verifier import Verifier
from tests.support.chats import write_lines
from tests.support.needed_plugins import names_of
from tests.support.preference_files import WORDS, write_models_and_pairs
from tests.support.rated_solutions import OPTIONS, solutions
from tests.support.router_losses import (
    COEFFICIENT,
    ROUTER,
    assert_gradient_of_mean,
    aux_loss,
    of_router_losses,
    z_loss,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models_and_pairs(tmp_path_factory.mktemp("experts"), 24)
    chats = [
        {"instruction": " ".join(WORDS[: 1 + n % 5]), "output": " ".join(WORDS[n % 7 :])}
        for n in range(24)
    ]
    write_lines(folder / "chats.jsonl", chats)
    write_lines(folder / "rated.jsonl", solutions(24))
    return folder


FILES = {"sft": "chats.jsonl", "prm": "rated.jsonl"}
"""Those of the other tasks are pairs."""


def values(models: Path, task: str) -> dict[str, Any]:
    return {
        **(OPTIONS if task == "prm" else {}),
        "model.vocab_size": 400,
        "data.train": [str(models / FILES.get(task, "train.jsonl"))],
        "data.tokenizer": str(models / "tokenizer"),
        "data.seq_length": 96,
    }


@pytest.mark.exhaustive(by=lambda task: {task} & {"sft", "dpo", "simpo"})
@pytest.mark.parametrize("task", ["sft", "dpo", "simpo", "orm", "prm"])
def test_the_losses_are_means_over_routed_tokens(models: Path, task: str) -> None:
    experts = {**MOE, **values(models, task), "task": task, "model.num_layers": 1}
    for key, formula in (("moe_aux_loss_coeff", aux_loss), ("moe_z_loss_coeff", z_loss)):
        losses = {f"model.{key}": COEFFICIENT}
        found, weight, inputs = of_router_losses(
            experts, losses, lambda dry_run: dry_run.task_samples(4)
        )
        assert len(inputs) == 4
        assert_gradient_of_mean(found[ROUTER], formula, weight, inputs)


LAYOUTS: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {
    "dpo, ep=2": ("dpo", {"ep": 2}, ()),
    "dpo, tp=2, ep=2": ("dpo", {"tp": 2, "ep": 2}, ()),
    "dpo, pp=2": ("dpo", {"pp": 2}, ()),
    "dpo, dp=2": ("dpo", {"dp": 2}, ()),
    "dpo, cp=2, ulysses": ("dpo", {"cp": 2}, ("ulysses",)),
    "dpo, cp=2, ring": ("dpo", {"cp": 2}, ("ring-attention",)),
    "simpo, tp=2, ep=2": ("simpo", {"tp": 2, "ep": 2}, ()),
    "simpo, pp=2": ("simpo", {"pp": 2}, ()),
    "simpo, cp=2, ring": ("simpo", {"cp": 2}, ("ring-attention",)),
}
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"model.moe_z_loss_coeff": 0.1},
    "simpo": {"model.moe_router_load_balancing_type": "seq_aux_loss"},
}


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_each_layout_is_one_rank(verify: Verifier, models: Path, layout: str) -> None:
    task, sizes, plugins = LAYOUTS[layout]
    question = Question(
        task=task,
        model="moe",
        enable=plugins,
        layout=sizes,
        steps=2,
        config={**values(models, task), "model.moe_aux_loss_coeff": 0.5, **LOSSES[task]},
    )
    verdict = verify(question)
    assert verdict.good, [check for check in verdict.checks if not check.passed]
