"""What the probes record of a step that overflows, of a wrong backward and of masked experts."""

from __future__ import annotations

from typing import Any

import attrs

from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.compare.slopes import by_differences
from ascend_run.tools.verify.oracle import compared_with_oracle, oracle_record
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.ranks import PoolRanks
from ascend_run.tools.verify.sides import sides_of
from benchmarks.campaigns.seeded_bugs import faults

SCHEDULE = "blind2-schedule-advances-on-skipped-steps"
NORM = "blind2-rms-norm-gradient-forgets-weight"
GROUPS = "blind2-masked-groups-score-zero"


def question_of(name: str) -> Question:
    bug = faults.BUGS[name]
    return Question(layout={}, model=bug.model, config=dict(bug.config))


def planted(name: str) -> Any:
    return f"{faults.__name__}:{name}"


def test_a_step_that_overflows_changes_nothing(gloo_pool: GlooPool) -> None:
    half = sides_of(question_of(SCHEDULE)).training_precision
    assert half is not None
    side = attrs.evolve(half.reference, steps=1, only_steps=True)
    (right,), (wrong,) = (PoolRanks(gloo_pool)(side, f) for f in (None, planted(SCHEDULE)))
    assert (right.changed_by_overflow, right.cases.skipped) == ([], 1)
    assert (wrong.changed_by_overflow, wrong.cases.skipped) == (["the schedule"], 1)


def test_the_module_with_a_wrong_backward_is_named(gloo_pool: GlooPool) -> None:
    plain = attrs.evolve(sides_of(question_of(NORM)).plain, steps=1)
    run = PoolRanks(gloo_pool)(plain, planted(NORM))
    (check,), fault = by_differences(run, plain.name)
    assert not check.passed
    assert fault is not None
    assert fault.module == "decoder.final_layernorm"
    assert "decoder.layers.1.mlp.linear_fc2" in fault.suspects


def test_an_expert_that_may_not_be_chosen_has_no_score(gloo_pool: GlooPool) -> None:
    sides = sides_of(question_of(GROUPS))
    plain = attrs.evolve(sides.plain, by_differences=False, steps=1)

    def fault_of(bug: str | None) -> Any:
        run = PoolRanks(gloo_pool)(plain, bug)
        expected = [oracle_record(plain.prepare(), run[0], plain.steps)]
        return compared_with_oracle(plain, run, expected)[1].fault

    assert fault_of(None) is None
    assert fault_of(planted(GROUPS)).module == "decoder.layers.0.mlp.router"
