"""``verify`` of a model with a score head: each layout is that of one rank, in float64 for each
parameter, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.compare.verdict import Outcome, Phase
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.ranks import PoolRanks
from ascend_run.tools.verify.verifier import Verifier
from tests.support.chats import CHATML, write_lines, write_tokenizer
from tests.support.needed_plugins import names_of
from tests.support.preference_files import preferences
from tests.tools.verify.faults import Undo

from . import faults


@pytest.fixture(scope="module")
def verify(gloo_pool: GlooPool) -> Verifier:
    return Verifier(PoolRanks(gloo_pool))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    write_tokenizer(folder / "tokenizer", CHATML)
    write_lines(folder / "train.jsonl", preferences(24))
    return folder


TIED = {"model.share_embeddings_and_output_weights": True}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], tuple[str, ...]]] = {
    "tp=2": ({"tp": 2}, {}, ()),
    "tp=2, sp": ({"tp": 2, "sp": 1}, {}, ()),
    "pp=2": ({"pp": 2}, {}, ()),
    "pp=2, tied": ({"pp": 2}, TIED, ()),
    "pp=2, vpp=2": ({"pp": 2, "vpp": 2}, {}, ()),
    "ep=2": ({"ep": 2}, {}, ()),
    "tp=2, ep=2": ({"tp": 2, "ep": 2}, {}, ()),
    "dp=2, distributed optimizer": ({"dp": 2}, {"ddp.use_distributed_optimizer": True}, ()),
    "tp=2, pp=2, sp": ({"tp": 2, "pp": 2, "sp": 1}, {}, ()),
    "cp=2, ulysses": ({"cp": 2}, {}, ("ulysses",)),
    "cp=2, ring": ({"cp": 2}, {}, ("ring-attention",)),
}


def question_of(pairs: Path, layout: str) -> Question:
    sizes, values, plugins = LAYOUTS[layout]
    return Question(
        task="orm",
        enable=plugins,
        layout=sizes,
        steps=2,
        config={
            "model.vocab_size": 400,
            "data.train": [str(pairs / "train.jsonl")],
            "data.tokenizer": str(pairs / "tokenizer"),
            "data.seq_length": 96,
            "model.moe_aux_loss_coeff": 0.0,
            **values,
        },
    )


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_each_layout_is_one_rank(verify: Verifier, pairs: Path, layout: str) -> None:
    verdict = verify(question_of(pairs, layout))
    assert verdict.good, [check for check in verdict.checks if not check.passed]
    assert verdict.outcome is Outcome.WITHIN
    lacks = "it has no formula for task=orm; it has no formula for model.num_labels=1"
    assert f"not compared with the oracle: {lacks}" in verdict.notes
    documents = {case.name: case.occurred for case in verdict.cases}
    assert documents["several documents in a row"]


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
            faults.swap_the_answers_on_the_second_rank,
            "dp=2, distributed optimizer",
            Phase.BACKWARD,
        ),
    ],
)
def test_each_fault_is_found(
    verify: Verifier, pairs: Path, fault: Callable[[], Undo], layout: str, phase: Phase
) -> None:
    verdict = verify(question_of(pairs, layout), fault)
    assert verdict.outcome is Outcome.DIVERGES
    assert verdict.fault is not None
    assert verdict.fault.phase is phase
