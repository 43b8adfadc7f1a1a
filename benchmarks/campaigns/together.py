"""Features together: at parity with the plain model on one rank, every pair in every layout.

Each case is a set of as many features as go together (``covering``). In each of twelve layouts,
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
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascend_run.testing.runtime import load_runtime

from .bisection import smallest
from .campaign import PASSED, Campaign, Outcome
from .covering import Items, pairs_of
from .feature_sets import SettingSets, all_sets, requirements
from .features import OPTIONS, config_of, features
from .pool_of_ranks import pool
from .reach import reach_of_trial
from .setting import Setting

if TYPE_CHECKING:
    from ascend_run.testing.parity import Case, Parity


def cases(seed: int) -> Sequence[str]:
    """Return JSON: plugins, those beside them, model, layout and config; nothing is drawn."""
    found = (case for of_setting in all_sets() for case in _cases_of(of_setting))
    return [json.dumps(case, sort_keys=True) for case in found]


def _cases_of(found: SettingSets) -> Iterator[dict[str, Any]]:
    setting = found.setting
    where = {"model": setting.model, "layout": setting.layout, "config": setting.config}
    for completed in found.sets:
        yield {**where, "plugins": completed.plugins, "beside": completed.beside}
    for names in sorted(map(sorted, found.refused)):
        completed = setting.complete(names)
        yield {
            **where,
            "plugins": completed.plugins,
            "beside": completed.beside,
            "refused": True,
        }


def new_parity() -> Parity:
    """Return one without the outcomes of earlier trials."""
    from ascend_run.testing.parity import Parity

    return Parity(pool(), load_runtime().numerics_of)


@functools.cache
def _parity() -> Parity:
    return new_parity()


def run(case: str) -> Outcome:
    """Plan a set and compare it; reduce it if that fails."""
    asked = json.loads(case)
    expected = asked.get("refused", False)
    problems = _problems(asked)
    if problems:
        verdict = PASSED if expected else "refused"
        return {"verdict": verdict, "refused": "; ".join(problems)}
    if expected:
        return {"verdict": "not refused"}
    error = _error(asked, _parity())
    return {"verdict": PASSED, "compared": True} if error is None else _reduced(asked, error)


def _reduced(asked: Mapping[str, Any], error: Exception) -> Outcome:
    """Return the outcome of a set that failed, with a smallest set that fails."""
    parity = new_parity()  # the other one returns what has failed, instead of running it again
    errors: dict[tuple[str, ...], Exception] = {}

    def fails(names: tuple[str, ...]) -> bool:
        part = _part(asked, names)
        found = None if part is None else _error(part, parity)
        if found is not None:
            errors[names] = found
        return found is not None

    names = tuple(asked["plugins"])
    why = {"why": _said(error), "where": "".join(traceback.format_exception(error)[-3:])}
    if not fails(names):
        return {"verdict": "not reproducible", **why}
    found = smallest(names, fails)
    return {"verdict": "fails", **why, "smallest": [*found], "error": _said(errors[found])}


def _part(asked: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    """Return the case of some of its features, with what they need there; None if it cannot run."""
    setting = Setting(**{key: asked[key] for key in ("model", "layout", "config")})
    needs = requirements()
    closed = {*names}.union(*(needs[name] for name in names))
    completed = setting.complete(sorted(closed))
    if completed.examined.problems:
        return None
    return {**asked, "plugins": completed.plugins, "beside": completed.beside}


def _error(asked: Mapping[str, Any], parity: Parity) -> Exception | None:
    try:
        parity(**_arguments(asked))
    except Exception as error:
        return error
    return None


def _problems(asked: Mapping[str, Any]) -> Sequence[str]:
    """Return why a case cannot start."""
    case = _case(asked)
    trial = case.trial((*case.plugins, *case.beside), steps=0, sharded=True)
    return load_runtime().examine(trial, case.world_size).problems


def _case(asked: Mapping[str, Any]) -> Case:
    from ascend_run.testing.parity import Case

    return Case(**_arguments(asked))


def _arguments(asked: Mapping[str, Any]) -> dict[str, Any]:
    plugins, beside = tuple(asked["plugins"]), tuple(asked["beside"])
    return {
        "plugins": plugins,
        "beside": beside,
        "model": asked["model"],
        "layout": asked["layout"],
        "config": {**config_of((*plugins, *beside)), **asked["config"]},
        "options": OPTIONS,
    }


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def reach(case: str) -> str:
    """Return the hash of all that a case can reach."""
    asked = json.loads(case)
    names = (*asked["plugins"], *asked["beside"])
    own = {key: value for key, value in OPTIONS.items() if key.split(".")[1] in names}
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
            pairs.setdefault(_where(asked), set()).update(pairs_of([names]))
        elif "refused" in outcome:
            refused[f"{', '.join(asked['plugins'])}: {outcome['refused']}"] += 1
    return {
        "features": [*features()],
        "compared": sum("compared" in outcome for outcome in outcomes.values()),
        "largest set": largest,
        "pairs of each layout": {where: len(found) for where, found in pairs.items()},
        "cases of each feature": dict(sorted(compared.items())),
        "refused": dict(sorted(refused.items())),
    }


def _where(asked: Mapping[str, Any]) -> str:
    layout = " ".join(f"{axis}={size}" for axis, size in asked["layout"].items()) or "one rank"
    recompute = ", full recompute" if "model.recompute_granularity" in asked["config"] else ""
    return f"{asked['model']}, {layout}{recompute}"


CAMPAIGN = Campaign(name="together", seed=0, cases=cases, run=run, figures=figures, reach=reach)
