"""More layouts than the one that is asked for; the verifier itself is replaced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError
from ascend_run.tools.verify.compare.verdict import Fault, Outcome, Phase, Verdict
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.sides import sides_of
from ascend_run.tools.verify.thorough import note_on, verify_thoroughly


class Stub:
    """Finds a fault in some layouts, and keeps the order of the calls."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.calls = bad, list[Any]()

    def run_references(self, questions: Iterable[Question]) -> None:
        self.calls.append([question.layout for question in questions])

    def __call__(self, question: Question) -> Verdict:
        self.calls.append(question.layout)
        is_bad = {*dict(question.layout or {}).values()} & {*self.bad}
        return Verdict(
            outcome=Outcome.DIVERGES if is_bad else Outcome.WITHIN,
            fault=Fault(phase=Phase.FORWARD, module="a") if is_bad else None,
            checks=(),
            modules=(),
            question=f"{question.layout}",
            declared={},
            references=(),
        )


def verified(question: Question, *bad: int) -> tuple[Verdict, Stub]:
    stub = Stub(*bad)
    return verify_thoroughly(stub, question), stub  # type: ignore[arg-type]


def test_three_and_four_ranks_and_both_models_are_verified() -> None:
    verdict, stub = verified(Question(layout={"tp": 2, "sp": 1}))
    assert verdict.good
    assert list(verdict.notes) == [
        f"verified: no plugin on {name}: within its declared numerics"
        for name in (
            "tp=2,sp",
            "tp=2,sp, moe",
            "tp=2,sp, fp16",
            *("tp=3,sp, dense", "tp=3,sp, moe"),
            *("tp=4,sp, dense", "tp=4,sp, moe"),
        )
    ]
    references, *candidates = stub.calls
    assert references == candidates
    assert references[0] == {"tp": 2, "sp": 1}


def test_the_first_bad_verdict_is_shown() -> None:
    verdict, _ = verified(Question(layout={"dp": 2}, model="dense"), 3)
    assert not verdict.good
    assert verdict.question == "{'dp': 3}"
    assert verdict.notes == (
        "verified: no plugin on dp=2: within its declared numerics",
        "verified: no plugin on dp=2, fp16: within its declared numerics",
        "verified: no plugin on dp=3, dense: DIVERGES at a (forward)",
        "verified: no plugin on dp=4, dense: within its declared numerics",
    )


@pytest.mark.needs_plugins("minicpm3")
@pytest.mark.parametrize("word", ["model.family=minicpm3", "model.multi_latent_attention=true"])
def test_three_ranks_share_a_model_of_latent_attention(word: str) -> None:
    """Each head has its own key, so that no number of groups is set."""
    question = Question(layout={"tp": 2, "sp": 1}, model="dense", overrides=(word,))
    verdict, stub = verified(question)
    assert not [note for note in verdict.notes if note.startswith("not verified: ")]
    assert {"tp": 3, "sp": 1} in stub.calls


@pytest.mark.needs_plugins("gmm")
def test_what_cannot_run_is_named_with_the_reason() -> None:
    verdict, stub = verified(Question(enable=("gmm",), layout={"ep": 2, "tp": 2}))
    assert stub.calls[0][1:] == [{"ep": 2, "tp": 2}, {"tp": 3}, {"tp": 4}, {"ep": 3}, {"ep": 4}]
    refused = [note for note in verdict.notes if note.startswith("not verified: ")]
    assert any("gmm on tp=4, dense: gmm is idle where" in note for note in refused)
    assert any("gmm on ep=2,tp=2, dense: " in note for note in refused)


def test_three_ranks_fit_unless_the_user_sets_what_they_need() -> None:
    overrides = ("model.num_attention_heads=8",)
    verdict, _ = verified(Question(layout={"tp": 2}, model="dense", overrides=overrides))
    (refused,) = [note for note in verdict.notes if note.startswith("not verified: ")]
    assert "tp=3" in refused
    assert "8" in refused


def test_a_question_that_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError):
        verified(Question(layout={"cp": 2}))


@pytest.mark.parametrize(
    ("layout", "has_note"),
    [({}, False), ({"tp": 2}, True), ({"tp": 2, "sp": 1, "pp": 2}, True), ({"dp": 3}, False)],
)
def test_two_ranks_do_not_show_what_more_would(layout: dict[str, int], has_note: bool) -> None:
    question = Question(layout=layout)
    sides_of(question)
    assert (note_on(question) is not None) is has_note
