"""The campaign ``resume``: the committed result is of every plugin and layout, and what a resumed
run does not get back is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ascend_run.registry.kinds import Kind
from benchmarks.campaigns import resume
from benchmarks.campaigns.campaign import PASSED, is_full, read_result
from benchmarks.campaigns.features import settled
from benchmarks.campaigns.seeded_bugs.mutation import mutated

RESULT = read_result(resume.CAMPAIGN.name)
PLUGINS = RESULT["figures"]["cases of each plugin"]
ENTRIES = "ascend_run.core.checkpoint.entries"


@pytest.mark.needs_plugins(*PLUGINS)
def test_the_committed_result_is_of_all_cases_and_passes() -> None:
    assert is_full(resume.CAMPAIGN, RESULT)
    assert RESULT["counts"] == {PASSED: RESULT["cases"]}
    assert {*PLUGINS} >= {*settled(), *settled(Kind.TASK)}


def test_every_plugin_was_compared_in_every_precision_with_dropout() -> None:
    figures = RESULT["figures"]
    without = {"reuse-fp32-param": {"fp16"}}  # refused by the plugin
    for name, precisions in PLUGINS.items():
        assert precisions.keys() == {"fp32", "bf16", "fp16"} - without.get(name, set()), name
    assert figures["compared"] + sum(figures["refused"].values()) == RESULT["cases"]
    assert figures["with dropout"] == figures["compared"]
    reasons = figures["refused"]
    assert reasons
    refusing = {why.lstrip("'").split()[0].strip("':") for why in reasons}
    assert refusing == {
        "fused-mlp",  # of layers without experts
        "gpt2",
        "hot-experts",
        "moe-tp-extend-ep",
        "recompute-activation",
        "reuse-fp32-param",
    }
    assert any("train.precision=fp16" in why for why in reasons)


class ThisProcess:
    """In place of a pool, as what is changed here is not changed elsewhere."""

    def run(self, job: Callable[..., Any], world_size: int, *given: Any, timeout: float) -> Any:
        assert world_size == 1
        return [job(*given)]


@pytest.mark.exhaustive(by=lambda target: ())
@pytest.mark.parametrize(
    ("target", "restored", "instead", "found"),
    [
        (
            f"{ENTRIES}:RandomState.load_state_dict",
            'torch.set_rng_state(state["torch"])',
            "pass",
            "rank 0: rng/rank_00000/torch (0,) differs",
        ),
        (
            f"{ENTRIES}:Progress.load_state_dict",
            "progress.consumed_samples",
            "progress.consumed_samples + 4",
            "'consumed_samples': 20",
        ),
        (
            "ascend_run.core.train.checkpointing:Checkpoints.restore",
            "if step is not None:",
            "if False:",
            "the run went on from the checkpoints [], not from 2 once",
        ),
    ],
    ids=["a random generator", "the place in the data", "nothing at all"],
)
def test_what_does_not_come_back_is_found(
    monkeypatch: pytest.MonkeyPatch, target: str, restored: str, instead: str, found: str
) -> None:
    case = next(c for c in resume.cases(0) if json.loads(c)["plugin"] == "pretrain")
    monkeypatch.setattr(resume, "pool", ThisProcess)
    monkeypatch.setattr(resume, "LAST", resume.FIRST + 2)
    with mutated(target, restored, instead):
        outcome = resume.run(case)
    assert outcome["verdict"] == "differs"
    assert any(found in problem for problem in outcome["all"])
