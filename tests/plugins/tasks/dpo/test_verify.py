"""``verify`` of a run with two models: each layout is that of one rank, in float64 for each
parameter, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_run.tools.verify.compare.verdict import Phase
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.verifier import Verifier
from tests.support import preference_faults, verified_tasks
from tests.support.needed_plugins import names_of
from tests.support.preference_files import write_models_and_pairs
from tests.support.verified_tasks import (
    assert_diverges_in,
    assert_is_one_rank,
    question,
)
from tests.tools.verify.faults import Undo

from . import faults


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_and_pairs(tmp_path_factory.mktemp("dpo"), 24)


LAYOUTS: dict[str, verified_tasks.Layout] = {
    **verified_tasks.LAYOUTS,
    "tp=2, sp, precomputed": (
        {"tp": 2, "sp": 1},
        {"plugins.dpo.precompute_ref_log_probs": True},
        (),
    ),
    "tp=2, base": ({"tp": 2}, {"plugins.dpo.reference": "base"}, ("lora",)),
}


def question_of(models: Path, layout: str) -> Question:
    return question("dpo", models, LAYOUTS[layout], {"model.moe_aux_loss_coeff": 0.0})


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_each_layout_is_one_rank(verify: Verifier, models: Path, layout: str) -> None:
    assert_is_one_rank(verify(question_of(models, layout)), "it has no formula for task=dpo")


@pytest.mark.exhaustive(by=lambda fault: [])
@pytest.mark.parametrize(
    ("fault", "layout", "phase"),
    [
        (faults.skip_the_reference, "pp=2", Phase.FORWARD),
        (faults.let_the_policy_be_the_reference, "tp=2", Phase.FORWARD),
        pytest.param(
            preference_faults.sum_gradients_of_documents_over_ranks,
            "cp=2, ulysses",
            Phase.BACKWARD,
            marks=pytest.mark.needs_plugins("ulysses"),
        ),
        pytest.param(
            preference_faults.keep_sums_of_documents_to_oneself,
            "cp=2, ring",
            Phase.FORWARD,
            marks=pytest.mark.needs_plugins("ring-attention"),
        ),
        (
            preference_faults.swap_the_answers_on_the_second_rank,
            "dp=2, distributed optimizer",
            Phase.FORWARD,
        ),
    ],
)
def test_each_fault_is_found(
    verify: Verifier, models: Path, fault: Callable[[], Undo], layout: str, phase: Phase
) -> None:
    assert_diverges_in(phase, verify(question_of(models, layout), fault))
