"""``verify`` of pairs without a reference: each layout is that of one rank, in float64 for each
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
from tests.support.needed_plugins import names_of
from tests.support.preference_files import write_models_and_pairs
from tests.tools.verify.faults import Undo

from . import faults


@pytest.fixture(scope="module")
def verify(gloo_pool: GlooPool) -> Verifier:
    return Verifier(PoolRanks(gloo_pool))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_and_pairs(tmp_path_factory.mktemp("simpo"), 24)


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], tuple[str, ...]]] = {
    "tp=2": ({"tp": 2}, {}, ()),
    "tp=2, sp": ({"tp": 2, "sp": 1}, {}, ()),
    "pp=2": ({"pp": 2}, {}, ()),
    "pp=2, vpp=2": ({"pp": 2, "vpp": 2}, {}, ()),
    "ep=2": ({"ep": 2}, {}, ()),
    "tp=2, ep=2": ({"tp": 2, "ep": 2}, {}, ()),
    "dp=2, distributed optimizer": ({"dp": 2}, {"ddp.use_distributed_optimizer": True}, ()),
    "tp=2, pp=2, sp": ({"tp": 2, "pp": 2, "sp": 1}, {}, ()),
    "cp=2, ulysses": ({"cp": 2}, {}, ("ulysses",)),
    "cp=2, ring": ({"cp": 2}, {}, ("ring-attention",)),
    "hinge, sft_weight, pp=2": (
        {"pp": 2},
        {"plugins.simpo.loss": "hinge", "plugins.simpo.sft_weight": 0.5},
        (),
    ),
    "sft_weight, cp=2, ulysses": ({"cp": 2}, {"plugins.simpo.sft_weight": 0.5}, ("ulysses",)),
}


def question_of(models: Path, layout: str) -> Question:
    sizes, values, plugins = LAYOUTS[layout]
    return Question(
        task="simpo",
        enable=plugins,
        layout=sizes,
        steps=2,
        config={
            "model.vocab_size": 400,
            "data.train": [str(models / "train.jsonl")],
            "data.tokenizer": str(models / "tokenizer"),
            "data.seq_length": 96,
            "model.moe_aux_loss_coeff": 0.0,
            **values,
        },
    )


@pytest.mark.exhaustive(by=lambda layout: [])
@pytest.mark.parametrize("layout", names_of(LAYOUTS, lambda case: case[2]))
def test_each_layout_is_one_rank(verify: Verifier, models: Path, layout: str) -> None:
    verdict = verify(question_of(models, layout))
    assert verdict.good, [check for check in verdict.checks if not check.passed]
    assert verdict.outcome is Outcome.WITHIN
    assert "not compared with the oracle: it has no formula for task=simpo" in verdict.notes
    documents = {case.name: case.occurred for case in verdict.cases}
    assert documents["several documents in a row"]


@pytest.mark.exhaustive(by=lambda fault: [])
@pytest.mark.parametrize(
    ("fault", "layout", "phase"),
    [
        (faults.divide_by_the_length_twice_on_the_second_rank, "pp=2", Phase.FORWARD),
        pytest.param(
            faults.sum_gradients_of_documents_over_ranks,
            "cp=2, ulysses",
            Phase.BACKWARD,
            marks=pytest.mark.needs_plugins("ulysses"),
        ),
        pytest.param(
            faults.keep_sums_of_documents_to_oneself,
            "cp=2, ring",
            Phase.FORWARD,
            marks=pytest.mark.needs_plugins("ring-attention"),
        ),
        (
            faults.swap_the_answers_on_the_second_rank,
            "dp=2, distributed optimizer",
            Phase.FORWARD,
        ),
    ],
)
def test_each_fault_is_found(
    verify: Verifier, models: Path, fault: Callable[[], Undo], layout: str, phase: Phase
) -> None:
    verdict = verify(question_of(models, layout), fault)
    assert verdict.outcome is Outcome.DIVERGES
    assert verdict.fault is not None
    assert verdict.fault.phase is phase
