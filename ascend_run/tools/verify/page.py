"""The verdict as an HTML page: one file without scripts that needs no network."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from ascend_run.core.files import replace_file
from ascend_run.plugin_api.errors import StorageError
from ascend_run.tools.pages.markup import Markup, details, element, join, table
from ascend_run.tools.verify.compare.thresholds import MODULE
from ascend_run.tools.verify.compare.verdict import Check, ModuleDeviation, Verdict

from .table import CHECK_COLUMNS, check_row, next_steps, shown_cases, shown_exercise

_WIDTH: Final = 900
_HEIGHT: Final = 150
_FLOOR: Final = 1e-17
_CEILING: Final = 10.0


def write_page(verdict: Verdict, target: Path) -> None:
    """
    Raises:
        StorageError: The file cannot be written.
    """
    try:
        replace_file(target, render(verdict))
    except OSError as error:
        raise StorageError(
            f"cannot write {target}", [f"{error.strerror or error}; choose another file for --html"]
        ) from error


def render(verdict: Verdict) -> str:
    """Return the page as text."""
    style = (files("ascend_run.tools.pages.assets") / "page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"verify {verdict.question}"),
        element("style", Markup(style)),
    )
    status = "finished" if verdict.good else "failed"
    header = element(
        "header",
        element("p", "ascend-run verify", class_="brand"),
        element("h1", verdict.question),
        element("p", element("span", verdict.sentence(), class_=f"status {status}")),
        *(element("p", line) for line in next_steps(verdict)),
        element("ul", *(element("li", shown_exercise(done)) for done in verdict.exercises)),
        element("ul", *(element("li", line) for line in shown_cases(verdict.cases))),
        element("ul", *(element("li", note) for note in verdict.notes)),
    )
    main = element("main", _drawings(verdict), _checks(verdict), _modules(verdict))
    page = element("html", head, element("body", header, main), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _checks(verdict: Verdict) -> Markup:
    rows = [check_row(check) for check in verdict.checks]
    return element(
        "section",
        element("h2", "Checks"),
        table(CHECK_COLUMNS, rows),
        *(_wrong(check) for check in verdict.checks if not check.passed),
    )


def _wrong(check: Check) -> Markup:
    items = element("ul", *(element("li", detail) for detail in check.details))
    return details(f"{check.name}, against {check.against}", items, open=True)


def _drawings(verdict: Verdict) -> Markup:
    return element(
        "section",
        element("h2", "Modules, against one rank"),
        element(
            "p",
            "Relative error of the moments of each module's output (forward) and of its gradient "
            "(backward), in the order of execution; the line is the tolerance.",
        ),
        _drawing("forward", verdict.modules, lambda module: module.forward),
        _drawing("backward", verdict.modules, lambda module: module.backward),
    )


def _drawing(
    title: str,
    modules: Sequence[ModuleDeviation],
    read: Callable[[ModuleDeviation], float | None],
) -> Markup:
    """One bar per module, on a logarithmic axis."""
    step = _WIDTH / max(1, len(modules))
    bars = []
    for index, module in enumerate(modules):
        error = read(module)
        if error is None:
            continue
        height = _height(error)
        bars.append(
            element(
                "rect",
                element("title", f"{module.module}: {error:.2e}"),
                x=f"{index * step:.1f}",
                y=f"{_HEIGHT - height:.1f}",
                width=f"{max(1.0, step - 1):.1f}",
                height=f"{height:.1f}",
                fill="var(--bad)" if error > MODULE else "var(--c0)",
            )
        )
    line = _HEIGHT - _height(MODULE)
    allowed = element(
        "line", x1=0, x2=_WIDTH, y1=f"{line:.1f}", y2=f"{line:.1f}", stroke="var(--muted)"
    )
    picture = element(
        "svg", *bars, allowed, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=title
    )
    return join([element("h3", title), picture])


def _height(error: float) -> float:
    clipped = min(max(error, _FLOOR), _CEILING) if math.isfinite(error) else _CEILING
    span = math.log10(_CEILING) - math.log10(_FLOOR)
    return 2 + (_HEIGHT - 2) * (math.log10(clipped) - math.log10(_FLOOR)) / span


def _modules(verdict: Verdict) -> Markup:
    rows = [(m.module, _shown(m.forward), _shown(m.backward)) for m in verdict.modules]
    heads = ("module", "forward", "backward")
    return element("section", details(f"All {len(rows)} modules", table(heads, rows)))


def _shown(error: float | None) -> str:
    return "cannot be compared" if error is None else f"{error:.2e}"
