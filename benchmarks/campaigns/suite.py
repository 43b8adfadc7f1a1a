"""The cases that the test suite leaves out: of a test marked ``exhaustive`` it runs a covering
sample (``tests.support.exhaustive``), the campaign runs all others.

Each case is the id of a test. They run in as many processes of pytest as there are workers, the
tests of a file together. A case that fails runs once more, by itself: a busy machine is no fault.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_run.registry.kinds import Kind

from .campaign import PASSED, Campaign, Outcome
from .features import ours
from .reach_of_test import reach_of_test
from .suite_runs import collected, outcomes


@functools.cache
def cases(seed: int) -> Sequence[str]:
    """Return the ids; the sample has a seed of its own."""
    return sorted(collected()["left"])


def run(case: str) -> Outcome:
    """Run one case in a process of its own."""
    ((_, outcome),) = outcomes([case], 1)
    return outcome


def figures(found: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """Name the plugins that there were, count the cases of each test, and list those that passed at
    the second attempt only."""
    tests = Counter(case.partition("[")[0] for case in found)
    passed = {case: outcome for case, outcome in found.items() if outcome["verdict"] == PASSED}
    again = [case for case, outcome in passed.items() if outcome.get("attempts", 1) > 1]
    return {
        "plugins": sorted(name for kind in Kind for name in ours(kind)),
        "tests": dict(sorted(tests.items())),
        "passed at the second attempt": again,
    }


CAMPAIGN = Campaign(
    name="suite",
    seed=0,
    cases=cases,
    run=run,
    run_all=outcomes,
    figures=figures,
    reach=reach_of_test,
)
