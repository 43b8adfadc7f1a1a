"""``verify`` of rated steps: each layout is that of one rank, in float64 for each
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
from tests.support.rated_solutions import OPTIONS, solutions
from tests.tools.verify.faults import Undo

from . import faults


@pytest.fixture(scope="module")
def verify(gloo_pool: GlooPool) -> Verifier:
    return Verifier(PoolRanks(gloo_pool))


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rated")
    write_tokenizer(folder / "tokenizer", CHATML)
    write_lines(folder / "train.jsonl", solutions(24))
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


def question_of(rated: Path, layout: str) -> Question:
    sizes, values, plugins = LAYOUTS[layout]
    return Question(
        task="prm",
        enable=plugins,
        layout=sizes,
        steps=2,
        config={
            "model.vocab_size": 400,
            "data.train": [str(rated / "train.jsonl")],
            "data.tokenizer": str(rated / "tokenizer"),
            "data.seq_length": 96,
            **OPTIONS,
            **values,
        },
    )


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_each_layout_is_one_rank(verify: Verifier, rated: Path, layout: str) -> None:
    verdict = verify(question_of(rated, layout))
    assert verdict.good, [check for check in verdict.checks if not check.passed]
    assert verdict.outcome is Outcome.WITHIN
    assert "not compared with the oracle: it has no formula for task=prm" in verdict.notes
    documents = {case.name: case.occurred for case in verdict.cases}
    assert documents["several documents in a row"]


@pytest.mark.exhaustive(by=lambda fault: [])
@pytest.mark.parametrize(
    ("fault", "layout", "phase"),
    [
        (faults.count_every_position, "tp=2", Phase.BACKWARD),
        (
            faults.take_the_next_rating_on_the_second_rank,
            "dp=2, distributed optimizer",
            Phase.FORWARD,
        ),
    ],
)
def test_each_fault_is_found(
    verify: Verifier, rated: Path, fault: Callable[[], Undo], layout: str, phase: Phase
) -> None:
    verdict = verify(question_of(rated, layout), fault)
    assert verdict.outcome is Outcome.DIVERGES
    assert verdict.fault is not None
    assert verdict.fault.phase is phase
