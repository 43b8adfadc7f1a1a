"""Cases that are sets of features in a setting: planned, tried and, if that fails, reduced."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascend_run.testing.runtime import load_runtime

from .bisection import smallest
from .campaign import PASSED, Outcome
from .feature_sets import RECOMPUTED, SettingSets, requirements
from .features import IN_SETS, config_of
from .setting import Completed, Setting

if TYPE_CHECKING:
    from ascend_run.testing.parity import Case

Asked = Mapping[str, Any]
"""Plugins, those beside them, model, layout and config; ``refused`` if planning refuses the set."""
Attempt = Callable[[Asked], Outcome]
"""Runs a set; returns what its outcome says besides the verdict, or raises why it fails."""


def cases_of(found: SettingSets) -> Iterator[dict[str, Any]]:
    """Yield the case of each set of a setting, then those of the refused ones."""
    for completed in found.sets:
        yield case_of(found.setting, completed)
    for names in sorted(map(sorted, found.refused)):
        yield {**case_of(found.setting, found.setting.complete(names)), "refused": True}


def case_of(setting: Setting, completed: Completed) -> dict[str, Any]:
    """Return the case of a set."""
    return {
        "model": setting.model,
        "layout": setting.layout,
        "config": setting.config,
        "plugins": completed.plugins,
        "beside": completed.beside,
    }


def outcome_of(asked: Asked, attempt: Attempt, again: Callable[[], Attempt]) -> Outcome:
    """Plan a set and try it; reduce it if that fails.

    Args:
        again: Returns an attempt that takes over nothing from the first one.
    """
    expected = asked.get("refused", False)
    problems = problems_of(asked)
    if problems:
        verdict = PASSED if expected else "refused"
        return {"verdict": verdict, "refused": "; ".join(problems)}
    if expected:
        return {"verdict": "not refused"}
    try:
        return {"verdict": PASSED, **attempt(asked)}
    except Exception as error:
        return _reduced(asked, error, again())


def _reduced(asked: Asked, error: Exception, attempt: Attempt) -> Outcome:
    """Return the outcome of a set that failed, with a smallest set that fails."""
    errors: dict[tuple[str, ...], Exception] = {}

    def fails(names: tuple[str, ...]) -> bool:
        part = _part(asked, names)
        if part is None:
            return False
        try:
            attempt(part)
        except Exception as found:
            errors[names] = found
        return names in errors

    names = tuple(asked["plugins"])
    why = {"why": _said(error), "where": "".join(traceback.format_exception(error)[-3:])}
    if not fails(names):
        return {"verdict": "not reproducible", **why}
    found = smallest(names, fails)
    return {"verdict": "fails", **why, "smallest": [*found], "error": _said(errors[found])}


def _part(asked: Asked, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the case of some of its features, with what they need there; None if it cannot run."""
    setting = Setting(**{key: asked[key] for key in ("model", "layout", "config")})
    needs = requirements()
    closed = {*names}.union(*(needs[name] for name in names))
    completed = setting.complete(sorted(closed))
    if completed.examined.problems:
        return None
    return {**asked, "plugins": completed.plugins, "beside": completed.beside}


def problems_of(asked: Asked) -> Sequence[str]:
    """Return why a case cannot start."""
    from ascend_run.testing.parity import Case

    case: Case = Case(**arguments_of(asked))
    trial = case.trial((*case.plugins, *case.beside), steps=0, sharded=True)
    return load_runtime().examine(trial, case.world_size).problems


def arguments_of(asked: Asked) -> dict[str, Any]:
    """Return the arguments of ``testing.parity.Case``."""
    plugins, beside = tuple(asked["plugins"]), tuple(asked["beside"])
    return {
        "plugins": plugins,
        "beside": beside,
        "model": asked["model"],
        "layout": asked["layout"],
        "config": {**config_of((*plugins, *beside)), **asked["config"]},
        "options": IN_SETS,
    }


def setting_name(asked: Asked) -> str:
    """Return the model and layout of a case, for figures."""
    layout = " ".join(f"{axis}={size}" for axis, size in asked["layout"].items()) or "one rank"
    recompute = ", full recompute" if RECOMPUTED.keys() <= asked["config"].keys() else ""
    return f"{asked['model']}, {layout}{recompute}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
