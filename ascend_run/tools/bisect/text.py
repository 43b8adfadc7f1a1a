"""The result of ``bisect`` as text. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ascend_run.core.run_files import CONFIG_NAME
from ascend_run.tools.terminal.tables import table

from .bisection import Bisection
from .choices import ENABLED, Compared, Kind, State


def text_of(result: Bisection, width: int | None = None) -> Iterator[str]:
    """Yield the lines: the verdict, why, and what was tried.

    Args:
        width: Width of the terminal; None: no wrapping.
    """
    yield sentence(result)
    yield from _values(result)
    if result.last.why:
        yield f"why: {result.last.why}"
    yield from _next(result)
    yield ""
    rows = [
        (str(number), ", ".join(tried.changes) or "none", str(tried.state), _where(tried))
        for number, tried in enumerate(result.tried, 1)
    ]
    header = ("", "enabled" if result.runs is None else "of B", "", "where")
    yield from table(header, rows, width=width, flexible=1)
    yield from (f"note: {note}" for note in result.notes)


def sentence(result: Bisection) -> str:
    """Return the verdict in one line."""
    if result.culprits is None:
        return _nothing_found(result)
    place = _place(result.step, result.last)
    if not result.culprits:
        return f"{_without_culprit(result)}, {place}"
    kinds = {choice.name: choice.kind for choice in result.choices}
    names = " and ".join(
        _listed(kind, [*of_kind]) for kind, of_kind in groupby(result.culprits, kinds.__getitem__)
    )
    if len(result.culprits) == 1:
        return f"{names} makes the runs part, {place}"
    return f"{names} make the runs part, only together, {place}"


def _listed(kind: Kind, names: list[str]) -> str:
    plurals = {Kind.PLUGIN: "plugins", Kind.SETTING: "settings", Kind.LAYOUT: "layout axes"}
    what = str(kind) if len(names) == 1 else plurals[kind]
    return " ".join((what, " and ".join(f"'{name}'" for name in names)))


def _nothing_found(result: Bisection) -> str:
    if result.runs is None:
        if result.last.state is State.CANNOT_RUN:
            return "the run with all plugins cannot start"
        return "nothing found: the run with all plugins agrees with the run without them"
    if result.last.state is State.CANNOT_RUN:
        return "run B cannot start here"
    return "nothing found: run A with all choices of run B agrees with run A"


def _without_culprit(result: Bisection) -> str:
    """Return what makes the runs part if none of the choices does."""
    if result.runs is not None:
        return "run A is not reproducible: it differs when it is repeated"
    kept = ", ".join(result.last.changes)
    if kept:
        return f"the plugins that the layout needs ({kept}) make the runs part"
    return "the layout makes the runs part"


def _values(result: Bisection) -> Iterator[str]:
    """Yield the values that two runs have for what was found."""
    if result.runs is None:
        return
    for choice in result.choices:
        if choice.name in (result.culprits or ()):
            yield f"{choice.name}: {choice.values[0]} in A, {choice.values[1]} in B"
    if result.culprits and (needed := [n for n in result.last.changes if n not in result.culprits]):
        yield f"with it: {', '.join(needed)}, without which it cannot run"


def _next(result: Bisection) -> Iterator[str]:
    """Yield the command that shows more of the plugins that were found."""
    names, config = list(result.last.changes if result.culprits else ()), ""
    if result.runs is not None:
        names = [
            choice.name
            for choice in result.choices
            if choice.name in (result.culprits or ()) and choice.values[1] == ENABLED
        ]
        config = f" --config {result.runs[1]}/{CONFIG_NAME}"
    if names:
        yield f"next: ascend-run verify --details --enable {','.join(names)}{config}"


def _where(compared: Compared) -> str:
    if compared.state is State.CANNOT_RUN:
        return compared.why
    return _place(compared.step, compared)


def _place(step: int | None, compared: Compared) -> str:
    at = {None: "", 0: "before the first step"}.get(step, f"at step {step}")
    return ", ".join(filter(None, (at, compared.where and f"in {compared.where}")))
