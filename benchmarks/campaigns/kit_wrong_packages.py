"""The kit against wrong packages: how many its checks stop, and whether it accuses a right one.

A right package passes with no problem in any check. A wrong one is that package with one mistake,
and passes if the check that should stop it does, with the message that names the mistake. If that
check finds nothing, the other checks run too, and the result has what they find.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .campaign import PASSED, Campaign, Outcome
from .pool_of_ranks import pool
from .wrong_packages import of_features, of_others, of_tasks
from .wrong_packages.mistake import Mistake
from .wrong_packages.package import Package, installed, right_packages

_SHARE: Final = 19 / 20
"""Of the wrong packages, what must be stopped; of the right ones none may be."""
_RIGHT: Final = "right: "

MISTAKES: Final[Mapping[str, Mistake]] = {
    mistake.name: mistake
    for mistake in (*of_features.MISTAKES, *of_tasks.MISTAKES, *of_others.MISTAKES)
}


def found_in(package: Package, case: str, codes: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the problems of each check of the kit that finds any.

    Args:
        codes: Checks to run; default: all.
    """
    from ascend_run.testing.conformance import CHECKS, Means, Subject
    from ascend_run.testing.runtime import load_runtime

    name = "".join(letter if letter.isalnum() else "_" for letter in case)
    with installed(package, f"ascend_run_case_{name}"):
        subject = Subject(package.names.name, Means(load_runtime(), pool))
        checks = [check for check in CHECKS if not codes or check.code in codes]
        verdicts = {check.code: check.judge(subject) for check in checks}
    return {code: verdict.problems for code, verdict in verdicts.items() if verdict.problems}


def run(case: str) -> Outcome:
    packages = right_packages()
    if case.startswith(_RIGHT):
        found = found_in(packages[case.removeprefix(_RIGHT)], case)
        return {"verdict": "accused" if found else PASSED, "problems": _first(found)}
    mistake = MISTAKES[case]
    wrong = mistake.applied_to(packages)
    found = found_in(wrong, case, mistake.checks)
    if (verdict := verdict_on(mistake, found)) != PASSED:
        found = found_in(wrong, f"{case} again", [])
        verdict = verdict_on(mistake, found)
    return {
        "verdict": verdict,
        "mistake": mistake.what,
        "package": mistake.package,
        "expected": list(mistake.checks),
        "says": mistake.says,
        "problems": _first(found),
    }


def verdict_on(mistake: Mistake, found: Mapping[str, Sequence[str]]) -> str:
    """Whether the expected check stops a wrong package, another one does, or none."""
    expected = (problem for code in mistake.checks for problem in found.get(code, ()))
    if any(mistake.says in problem for problem in expected):
        return PASSED
    return "stopped for another reason" if found else "not stopped"


def _first(found: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {code: problems[0] for code, problems in found.items()}


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    right = [o for case, o in outcomes.items() if case.startswith(_RIGHT)]
    wrong = [o for case, o in outcomes.items() if not case.startswith(_RIGHT)]
    stopped = [o for o in wrong if o["verdict"] == PASSED]
    return {
        "right packages": len(right),
        "accused": sum(o["verdict"] != PASSED for o in right),
        "wrong packages": len(wrong),
        "stopped by the expected check": len(stopped),
        "checks that stopped one": sorted(
            {code for o in stopped for code in o["expected"] if code in o["problems"]}
        ),
    }


def passes(figures: Mapping[str, Any], counts: Mapping[str, int]) -> bool:
    wrong = figures["wrong packages"]
    stopped = figures["stopped by the expected check"]
    return figures["accused"] == 0 and wrong >= 20 and stopped >= math.ceil(_SHARE * wrong)


def cases(seed: int) -> Sequence[str]:
    return (*(f"{_RIGHT}{name}" for name in right_packages()), *MISTAKES)


CAMPAIGN = Campaign(
    name="kit-wrong-packages", seed=0, cases=cases, run=run, figures=figures, passes=passes
)
