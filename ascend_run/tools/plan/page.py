"""The plan as an HTML page: one file that needs no network and no other file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ascend_run import __version__
from ascend_run.core.files import replace_file
from ascend_run.plugin_api.errors import StorageError
from ascend_run.prepare.plan.records import Bundle, Plan
from ascend_run.prepare.prepare import PreparedRun
from ascend_run.tools.pages.config_rows import ConfigRow, shown_value
from ascend_run.tools.pages.frame import document, section
from ascend_run.tools.pages.markup import Markup, element, join
from ascend_run.tools.pages.plan_section import plan_section
from ascend_run.tools.pages.ranks_section import group_membership, ranks_section
from ascend_run.tools.pages.record_reading import read_table
from ascend_run.tools.pages.run_folder import RunData
from ascend_run.tools.pages.run_records import LockedPlugin
from ascend_run.tools.report.summary import utc
from ascend_run.tools.report.tables import config_section
from ascend_run.types.layout import Layout

from .chosen_values import chosen_values
from .cost_pictures import cost_section
from .cost_records import cost_of
from .cost_text import count, seconds, size

_SCRIPTS: Final = ("format.js", "scale.js", "plot.js", "line_chart.js", "heat_map.js", "page.js")


def write_plan_page(prepared: PreparedRun, target: Path, *, named: str) -> None:
    """Write the page atomically.

    Args:
        named: Name of the config, for the heading.

    Raises:
        StorageError: The file cannot be written.
    """
    text = render_plan(prepared, named=named, written=time.time())
    try:
        replace_file(target, text)
    except OSError as error:
        raise StorageError(
            f"cannot write {target}",
            [f"{error.strerror or error}; choose another file with --html"],
        ) from error


def render_plan(prepared: PreparedRun, *, named: str, written: float) -> str:
    """Return the page as text.

    Args:
        written: Unix time, for the footer.
    """
    plan = prepared.plan
    cost = cost_of(plan)
    run = RunData(
        name=named,
        path=Path(named),
        plan=plan,
        lock=read_table(prepared.lock, LockedPlugin),
        config_rows=_rows(prepared),
    )
    ranks = ranks_section(run)
    sections = [
        None if plan.level is None else _level(plan.level),
        section("plan-0", "Plugins and hooks", plan_section(run)),
        section("ranks-0", "Ranks", element("div", ranks, _stages(plan), data_run=0)),
        section("cost", "Estimated cost", cost_section(cost)) if cost else None,
        section("config-0", "Configuration", config_section(run)),
    ]
    return document(
        title=f"{named} \N{MIDDLE DOT} ascend-run plan",
        brand="ascend-run plan",
        top=_top(prepared, named),
        sections=sections,
        foot=element("p", f"Written {utc(written)} by ascend-run {__version__}; nothing has run."),
        data={
            "runs": [named],
            "marks": [],
            "charts": {},
            "heats": {},
            "groups": [group_membership(run)],
        },
        scripts=_SCRIPTS,
    )


def _top(prepared: PreparedRun, named: str) -> Markup:
    config, plan = prepared.config, prepared.plan
    features = ", ".join(config.enable) or "no feature"
    lead = f"{features}; task {config.task}, family {config.model.family}, on {config.platform}"
    figures = [
        element("div", element("dt", name), element("dd", element("strong", value)))
        for name, value in _figures(plan, prepared.layout)
    ]
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return join(
        [
            element("h1", named),
            element("p", lead, class_="lead"),
            element("dl", *figures, class_="figures"),
            element("p", versions, class_="versions"),
        ]
    )


def _figures(plan: Plan, layout: Layout) -> Iterator[tuple[str, str]]:
    used = [f"{axis} {size}" for axis, size in plan.layout.axes.items() if size > 1]
    experts = f", ep {layout.ep}" if layout.ep > 1 else ""
    yield "Ranks", f"{layout.world_size:,}"
    yield "Layout", (" \N{MULTIPLICATION SIGN} ".join(used) or "one rank") + experts
    if (cost := cost_of(plan)) is None:
        return
    yield "Peak memory per rank", size(max(stage.memory.peak for stage in cost.stages))
    yield "Parameters per rank", count(max(stage.parameters for stage in cost.stages))
    if cost.time is not None:
        yield f"Step on {cost.time.device}", seconds(cost.time.step)


def _level(bundle: Bundle) -> Markup:
    """The plugins that ``--level`` adds and leaves out."""
    lines = [f"adds {', '.join(bundle.members) or 'nothing'}"]
    lines += [f"leaves out {name}: {why}" for name, why in bundle.left_out.items()]
    items = [element("li", line) for line in lines]
    return section("level", f"Level {bundle.level}", element("ul", *items, class_="note"))


def _stages(plan: Plan) -> Markup | None:
    stages = plan.layout.stages
    if len(stages) == 1:
        return None
    words = []
    for rank, chunks in enumerate(stages):
        held = [f"{layers[0]} to {layers[-1]}" if layers else "none" for layers in chunks]
        words.append(f"pp {rank}: {', then '.join(held)}")
    return element("p", f"Layers by stage: {'; '.join(words)}.", class_="note")


def _rows(prepared: PreparedRun) -> tuple[ConfigRow, ...]:
    rows = []
    for key, value, origin in chosen_values(prepared.resolved, everything=True):
        part, _, name = key.rpartition(".")
        rows.append(ConfigRow(part, name, shown_value(value), origin))
    return tuple(rows)
