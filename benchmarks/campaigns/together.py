"""Features together: at parity with the plain model on one rank, every pair in every layout.

Each case is a set of as many features as go together (``covering``). In each of thirteen layouts,
without and with full recompute, the sets hold every feature and every pair that resolution and
planning allow there. Forward and every gradient are compared in float64, then five steps in float32
(``testing.parity``). Features that declare ``bitwise`` also have sets of their own, as only such a
set is compared bitwise; a pair of which one makes the other idle is a set of its own. A minimal set
that planning refuses is a case, too, which lists the reason.

A set that fails is reduced to a smallest failing one (``bisection``). What a case can reach is
hashed (``reach``): a run on another commit repeats only the cases whose code has changed.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ascend_run.testing.runtime import load_runtime

from .campaign import Campaign, Outcome
from .covering import Items, pairs_of
from .feature_sets import all_sets
from .features import IN_SETS, config_of, settled
from .pool_of_ranks import pool
from .reach import reach_of_trial
from .set_cases import Asked, arguments_of, cases_of, outcome_of, setting_name

if TYPE_CHECKING:
    from ascend_run.testing.parity import Parity


def cases(seed: int) -> Sequence[str]:
    """Return JSON: plugins, those beside them, model, layout and config; nothing is drawn."""
    found = (case for of_setting in all_sets() for case in cases_of(of_setting))
    return [json.dumps(case, sort_keys=True) for case in found]


def new_parity() -> Parity:
    """Return one without the outcomes of earlier trials."""
    from ascend_run.testing.parity import Parity

    return Parity(pool(), load_runtime().numerics_of)


@functools.cache
def _parity() -> Parity:
    return new_parity()


def run(case: str) -> Outcome:
    """Plan a set and compare it; reduce it if that fails."""
    # A Parity returns what has failed, instead of running it again.
    return outcome_of(
        json.loads(case), partial(_compared, _parity()), lambda: partial(_compared, new_parity())
    )


def _compared(parity: Parity, asked: Asked) -> Outcome:
    parity(**arguments_of(asked))
    return {"compared": True}


def reach(case: str) -> str:
    """Return the hash of all that a case can reach."""
    asked = json.loads(case)
    names = (*asked["plugins"], *asked["beside"])
    own = {key: value for key, value in IN_SETS.items() if key.split(".")[1] in names}
    return reach_of_trial(names, asked["model"], json.dumps([own, config_of(names)]))


def figures(outcomes: Mapping[str, Outcome]) -> Mapping[str, Any]:
    """Count what was compared, of which features, and what was refused for which reason."""
    compared: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    pairs: dict[str, set[Items]] = {}
    largest = 0
    for case, outcome in outcomes.items():
        asked = json.loads(case)
        if "compared" in outcome:
            names = {*asked["plugins"], *asked["beside"]}
            compared.update(names)
            largest = max(largest, len(names))
            pairs.setdefault(setting_name(asked), set()).update(pairs_of([names]))
        elif "refused" in outcome:
            refused[f"{', '.join(asked['plugins'])}: {outcome['refused']}"] += 1
    return {
        "features": [*settled()],
        "compared": sum("compared" in outcome for outcome in outcomes.values()),
        "largest set": largest,
        "pairs of each layout": {where: len(found) for where, found in pairs.items()},
        "cases of each feature": dict(sorted(compared.items())),
        "refused": dict(sorted(refused.items())),
    }


CAMPAIGN = Campaign(name="together", seed=0, cases=cases, run=run, figures=figures, reach=reach)
