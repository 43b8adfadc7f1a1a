"""``verify`` of packed conversations: each layout is that of one rank, in float64 for each
parameter, on the samples of the task itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from ascend_run.testing.models import MODELS
from ascend_run.tools.verify.compare.verdict import Outcome, Phase
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.verifier import Verifier
from tests.support import verified_tasks
from tests.support.chats import CHATML, write_lines, write_tokenizer
from tests.support.needed_plugins import names_of
from tests.support.verified_tasks import assert_diverges_in, question
from tests.tools.verify.faults import Undo

from . import faults
from .test_training import conversations

LAYOUTS: dict[str, verified_tasks.Layout] = {
    **verified_tasks.LAYOUTS,
    "tp=2, ep=2": ({"tp": 2, "ep": 2, "sp": 1}, {}, ()),
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write conversations of several lengths, and a file that names the task: with one, ``verify``
    leaves the samples to the run."""
    folder = tmp_path_factory.mktemp("chats")
    write_tokenizer(folder / "tokenizer", CHATML)
    write_lines(folder / "train.jsonl", conversations(24))
    (folder / "run.toml").write_text('task = "sft"\n', encoding="utf-8")
    return folder


def question_of(chats: Path, layout: str) -> Question:
    model = MODELS["moe" if "ep" in LAYOUTS[layout][0] else "dense"]
    values = {
        **model,
        "plugins.sft.packing": True,
        "model.moe_aux_loss_coeff": 0.0,
        "model.num_layers": 4,
        "model.vocab_size": 400,
        "data.seq_length": 96,
    }
    asked = question("sft", chats, LAYOUTS[layout], values)
    return attrs.evolve(asked, file=str(chats / "run.toml"))


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_each_layout_is_one_rank(verify: Verifier, chats: Path, layout: str) -> None:
    verdict = verify(question_of(chats, layout))
    assert verdict.good, [check for check in verdict.checks if not check.passed]
    assert verdict.outcome is Outcome.WITHIN
    assert not [note for note in verdict.notes if "not compared with the oracle" in note]
    documents = {case.name: case.occurred for case in verdict.cases}
    assert documents["several documents in a row"]


@pytest.mark.exhaustive(by=lambda fault: [])
@pytest.mark.parametrize(
    ("fault", "layout", "phase"),
    [
        (faults.train_prompts_on_the_second_rank, "dp=2, distributed optimizer", Phase.FORWARD),
        (
            faults.count_every_token_on_the_second_rank,
            "dp=2, distributed optimizer",
            Phase.BACKWARD,
        ),
    ],
)
def test_each_fault_is_found(
    verify: Verifier, chats: Path, fault: Callable[[], Undo], layout: str, phase: Phase
) -> None:
    assert_diverges_in(phase, verify(question_of(chats, layout), fault))
