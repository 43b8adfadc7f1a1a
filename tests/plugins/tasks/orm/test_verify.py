"""``verify`` of a model with a score head: each layout is that of one rank, in float64 for each
parameter, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_run.tools.verify.compare.verdict import Phase
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.verifier import Verifier
from tests.support import verified_tasks
from tests.support.needed_plugins import names_of
from tests.support.preference_faults import swap_the_answers_on_the_second_rank
from tests.support.preference_files import write_pairs
from tests.support.verified_tasks import (
    TIED,
    assert_diverges_in,
    assert_is_one_rank,
    question,
)
from tests.tools.verify.faults import Undo

from . import faults


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"), 24)


LAYOUTS = {**verified_tasks.LAYOUTS, "pp=2, tied": TIED}


def question_of(pairs: Path, layout: str) -> Question:
    return question("orm", pairs, LAYOUTS[layout], {"model.moe_aux_loss_coeff": 0.0})


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_each_layout_is_one_rank(verify: Verifier, pairs: Path, layout: str) -> None:
    lacks = "it has no formula for task=orm; it has no formula for model.num_labels=1"
    assert_is_one_rank(verify(question_of(pairs, layout)), lacks)


@pytest.mark.exhaustive(by=lambda fault: [])
@pytest.mark.parametrize(
    ("fault", "layout", "phase"),
    [
        (faults.sum_gradients_of_scores_over_tensor_ranks, "tp=2", Phase.BACKWARD),
        pytest.param(
            faults.score_another_token_on_the_second_rank,
            "cp=2, ulysses",
            Phase.FORWARD,
            marks=pytest.mark.needs_plugins("ulysses"),
        ),
        (
            faults.draw_another_head_on_the_second_rank,
            "dp=2, distributed optimizer",
            Phase.FORWARD,
        ),
        (
            swap_the_answers_on_the_second_rank,
            "dp=2, distributed optimizer",
            Phase.BACKWARD,
        ),
    ],
)
def test_each_fault_is_found(
    verify: Verifier, pairs: Path, fault: Callable[[], Undo], layout: str, phase: Phase
) -> None:
    assert_diverges_in(phase, verify(question_of(pairs, layout), fault))
