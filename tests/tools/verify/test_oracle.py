"""The plain run against the oracle: it agrees, or what is wrong on both sides is found."""

from __future__ import annotations

import re
from typing import Final

import attrs
import pytest

from ascend_run.testing.pool import GlooPool
from ascend_run.tools.verify.compare import modules
from ascend_run.tools.verify.compare.comparison import Comparison
from ascend_run.tools.verify.compare.thresholds import MODULE
from ascend_run.tools.verify.judging import judge
from ascend_run.tools.verify.oracle import compared_with_oracle, oracle_record
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.ranks import PoolRanks
from ascend_run.tools.verify.sides import sides_of
from ascend_run.tools.verify.table import next_steps
from benchmarks.campaigns.seeded_bugs import both_sides, faults
from benchmarks.campaigns.seeded_bugs.bug import Bug
from tests.support.oracle_cases import CASES, DROPPING, OracleCase

from . import faults as faults_of_runs

MAIN: Final = ("input_layernorm", "self_attention", "self_attention.core_attention", "mlp")


def compared(
    pool: GlooPool, question: Question, fault: str | None = None
) -> tuple[Comparison, modules.Trace, modules.Trace]:
    """Compare the plain run of a question with the oracle; return the moments of both too."""
    sides = sides_of(question)
    assert not sides.unknown
    plain = PoolRanks(pool)(attrs.evolve(sides.plain, by_differences=False), fault)
    expected = [oracle_record(sides.plain.prepare(), plain[0], sides.plain.steps)]
    _, comparison = compared_with_oracle(sides.plain, plain, expected)
    return comparison, modules.trace(plain), modules.trace(expected)


@pytest.mark.exhaustive(by=lambda case: ())
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.needs_plugins(*case.enable))
        for name, case in CASES.items()
        if case.config  # every other test of verify compares the built-in models
    ],
)
def test_a_plain_run_agrees_with_the_oracle(gloo_pool: GlooPool, case: OracleCase) -> None:
    question = Question(enable=case.enable, layout={}, model=case.model, config=case.config)
    found, trace, wanted = compared(gloo_pool, question)
    assert [check for check in found.checks if not check.passed] == []
    assert {check.name for check in found.checks} >= {"gradients", "parameter groups"}
    assert modules.first_forward(trace, wanted, MODULE) is None
    assert modules.first_backward(trace, wanted, MODULE) is None
    shown = {m.module for m in found.modules if m.forward is not None}
    assert shown >= {"embedding", "decoder.layers.1", "decoder.final_layernorm", "model"}
    assert shown >= {f"decoder.layers.1.{name}" for name in MAIN}


@pytest.mark.exhaustive(by=lambda case: ())
@pytest.mark.parametrize("case", DROPPING.values(), ids=DROPPING)
def test_a_run_that_drops_tokens_agrees_with_the_oracle(
    gloo_pool: GlooPool, case: OracleCase
) -> None:
    question = Question(layout={}, model=case.model, config=case.config)
    found, trace, wanted = compared(gloo_pool, question)
    assert [check for check in found.checks if not check.passed] == []
    assert modules.first_forward(trace, wanted, MODULE) is None
    assert modules.first_backward(trace, wanted, MODULE) is None


@pytest.mark.exhaustive(by=lambda bug: bug.phases)
@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.name, marks=pytest.mark.needs_plugins(*bug.plugins))
        for bug in both_sides.BUGS
    ],
)
def test_a_mistake_of_every_run_is_found(gloo_pool: GlooPool, bug: Bug) -> None:
    question = Question(enable=bug.plugins, layout={}, model=bug.model, config=bug.config)
    found, _, _ = compared(gloo_pool, question, f"{faults.__name__}:{bug.name}")
    assert found.fault is not None
    assert re.fullmatch(bug.modules, found.fault.module), found.fault
    assert found.fault.phase in bug.phases


def test_a_wrong_clipping_threshold_of_all_runs_is_found(gloo_pool: GlooPool) -> None:
    """Only a step between the right threshold and the wrong one shows it."""
    sides = sides_of(Question(layout={}))
    plain = PoolRanks(gloo_pool)(
        attrs.evolve(sides.plain, by_differences=False), faults_of_runs.clip_beyond_half_only
    )
    expected = [oracle_record(sides.plain.prepare(), plain[0], sides.plain.steps)]
    verdict = judge(sides, plain, [(sides.plain, plain)], oracle=expected)
    assert verdict.sentence() == "DIVERGES at optimizer (optimizer)"
    assert verdict.fault is not None
    assert verdict.fault.in_all_runs
    (line,) = [line for line in next_steps(verdict) if line.startswith("next: ")]
    assert line.startswith("next: all compared runs agree with each other")


@pytest.mark.needs_plugins("lora")
def test_what_the_oracle_does_not_know_is_said_by_name() -> None:
    config = {"model.hidden_dropout": 0.1, "plugins.lora.dropout": 0.2}
    sides = sides_of(Question(enable=("lora",), layout={}, config=config))
    assert sides.unknown == ("it has no formula for plugins.lora.dropout=0.2",)
    assert any(
        "the oracle: it has no formula for plugins.lora.dropout=0.2" in n for n in sides.notes
    )
    assert not sides.plain.keeps_samples


def test_a_model_too_large_for_the_oracle_is_said_to_be() -> None:
    sides = sides_of(Question(layout={}, config={"data.seq_length": 65536}))
    (reason,) = sides.unknown
    assert "GiB" in reason
