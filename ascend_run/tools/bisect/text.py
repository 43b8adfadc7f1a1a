"""The result of ``bisect`` as text. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_run.tools.terminal.tables import table

from .bisection import Bisection
from .comparing import Compared, State


def text_of(result: Bisection) -> Iterator[str]:
    """Yield the lines: the verdict, why, and what was tried."""
    yield sentence(result)
    if result.last.why:
        yield f"why: {result.last.why}"
    if result.culprits:
        yield f"next: ascend-run verify --details --enable {','.join(result.last.enabled)}"
    yield ""
    rows = [
        (str(number), ", ".join(tried.enabled) or "none", str(tried.state), _where(tried))
        for number, tried in enumerate(result.tried, 1)
    ]
    yield from table(("", "enabled", "", "where"), rows)


def sentence(result: Bisection) -> str:
    """Return the verdict in one line."""
    if result.culprits is None:
        if result.last.state is State.CANNOT_RUN:
            return "the run with all plugins cannot start"
        return "nothing found: the run with all plugins agrees with the run without them"
    place = _where(result.last)
    if not result.culprits:
        kept = ", ".join(result.last.enabled)
        what = f"the plugins that the layout needs ({kept}) make" if kept else "the layout makes"
        return f"{what} the runs part, {place}"
    names = " and ".join(f"'{name}'" for name in result.culprits)
    if len(result.culprits) == 1:
        return f"plugin {names} makes the runs part, {place}"
    return f"plugins {names} make the runs part, only together, {place}"


def _where(compared: Compared) -> str:
    if compared.state is State.CANNOT_RUN:
        return compared.why
    step = "" if compared.step is None else f"at step {compared.step}"
    return ", ".join(filter(None, (step, compared.where and f"in {compared.where}")))
