"""``verify`` on plugins that do nothing: it must say so of each, and never that it is proven."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ascend_run.plugin_api.implementations import implementations
from ascend_run.testing.offering import offered

from .campaign import PASSED, Campaign, Outcome
from .idle_plugins import forwards, providers, surroundings
from .idle_plugins.idle import Idle
from .pool_of_ranks import pool

if TYPE_CHECKING:
    from ascend_run.tools.verify.verifier import Verifier

PLUGINS: Final[Mapping[str, Idle]] = {
    idle.name: idle for module in (forwards, providers, surroundings) for idle in module.PLUGINS
}


def cases(seed: int) -> Sequence[str]:
    """The plugins' names."""
    return tuple(PLUGINS)


@functools.cache
def _verifier() -> Verifier:
    """One for all cases: it keeps the runs that it compares with."""
    from ascend_run.tools.verify.ranks import PoolRanks
    from ascend_run.tools.verify.verifier import Verifier

    return Verifier(PoolRanks(pool()))


def run(case: str) -> Outcome:
    from ascend_run.tools.verify.compare.verdict import Outcome as Said
    from ascend_run.tools.verify.questions import Question

    idle = PLUGINS[case]
    with offered(idle.plugin):
        question = Question(enable=(case,), layout=idle.layout, model=idle.model)
        verdict = _verifier()(question)
    (exercise,) = (found for found in verdict.exercises if found.subject == case)
    is_said = verdict.outcome is Said.NOT_EXERCISED and not exercise.exercised
    wrong = "called proven" if verdict.good or exercise.exercised else "another verdict"
    return {
        "verdict": PASSED if is_said and verdict.exit_code == 1 else wrong,
        "says": verdict.sentence(),
        "exit code": verdict.exit_code,
        "why": exercise.why,
        "fix": exercise.fix,
        "effects": list(exercise.effects),
        "failed checks": [check.name for check in verdict.checks if not check.passed],
    }


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    hooks = {hook for case in outcomes for hook in implementations(PLUGINS[case].plugin)}
    return {
        "plugins that do nothing": len(outcomes),
        "called proven": sum(o["verdict"] == "called proven" for o in outcomes.values()),
        "with exit code 1": sum(o.get("exit code") == 1 for o in outcomes.values()),
        "hooks": sorted(hooks),
    }


CAMPAIGN = Campaign(name="verify-idle", seed=0, cases=cases, run=run, figures=figures)
