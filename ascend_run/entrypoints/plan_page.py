"""The plan as a page: one file that needs no network and no other file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ascend_run import __version__
from ascend_run.core.files import replace_file
from ascend_run.plugin_api.errors import StorageError

from .cost_pictures import cost_section
from .plan_costs import count, seconds, size
from .plan_data import chosen_values
from .planning import Prepared
from .report.config_rows import ConfigRow, shown_value
from .report.frame import document, section
from .report.markup import Markup, element, join
from .report.plan_section import plan_section
from .report.ranks_section import group_membership, ranks_section
from .report.run_folder import RunData
from .report.summary import utc
from .report.tables import config_section

_SCRIPTS: Final = ("format.js", "scale.js", "plot.js", "line_chart.js", "heat_map.js", "page.js")


def write_plan_page(prepared: Prepared, target: Path, *, named: str) -> None:
    """Write the page, whole or not at all.

    Args:
        named: What the plan was made from, for the heading.

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


def render_plan(prepared: Prepared, *, named: str, written: float) -> str:
    """The page as text.

    Args:
        written: Seconds since 1970, for the foot of the page.
    """
    plan = prepared.plan
    run = RunData(
        name=named, path=Path(named), plan=plan, lock=prepared.lock, config_rows=_rows(prepared)
    )
    ranks = ranks_section(run)
    sections = [
        _level(plan),
        section("plan-0", "Plugins and hooks", plan_section(run)),
        section("ranks-0", "Ranks", element("div", ranks, _stages(plan), data_run=0)),
        section("cost", "What it is expected to cost", cost_section(plan["cost"]))
        if "cost" in plan
        else None,
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


def _top(prepared: Prepared, named: str) -> Markup:
    config, plan = prepared.config, prepared.plan
    features = ", ".join(config.enable) or "no feature"
    lead = f"{features}; task {config.task}, family {config.model.family}, on {config.platform}"
    figures = [
        element("div", element("dt", name), element("dd", element("strong", value)))
        for name, value in _figures(plan)
    ]
    versions = ", ".join(f"{name} {version}" for name, version in plan["versions"].items())
    return join(
        [
            element("h1", named),
            element("p", lead, class_="lead"),
            element("dl", *figures, class_="figures"),
            element("p", versions, class_="versions"),
        ]
    )


def _figures(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    layout = plan["layout"]
    used = [f"{axis} {size}" for axis, size in layout["axes"].items() if size > 1]
    ep = layout["expert_axes"]["ep"]
    yield "Ranks", f"{layout['world_size']:,}"
    yield (
        "Layout",
        (" \N{MULTIPLICATION SIGN} ".join(used) or "one rank") + (f", ep {ep}" if ep > 1 else ""),
    )
    if "cost" not in plan:
        return
    stages = plan["cost"]["stages"]
    yield "Peak memory of a rank", size(max(stage["memory"]["peak"] for stage in stages))
    yield "Parameters of a rank", count(max(stage["parameters"] for stage in stages))
    if "time" in plan["cost"]:
        expected = plan["cost"]["time"]
        yield f"Step on {expected['device']}", seconds(expected["step"])


def _level(plan: Mapping[str, Any]) -> Markup | None:
    """What ``--level`` came to."""
    if "level" not in plan:
        return None
    bundle = plan["level"]
    lines = [f"adds {', '.join(bundle['members']) or 'nothing'}"]
    lines += [f"leaves out {name}: {why}" for name, why in bundle["left_out"].items()]
    items = [element("li", line) for line in lines]
    return section("level", f"Level {bundle['level']}", element("ul", *items, class_="note"))


def _stages(plan: Mapping[str, Any]) -> Markup | None:
    stages = plan["layout"]["stages"]
    if len(stages) == 1:
        return None
    words = []
    for rank, chunks in enumerate(stages):
        held = [f"{layers[0]} to {layers[-1]}" if layers else "none" for layers in chunks]
        words.append(f"pp {rank}: {', then '.join(held)}")
    return element("p", f"Layers by stage: {'; '.join(words)}.", class_="note")


def _rows(prepared: Prepared) -> tuple[ConfigRow, ...]:
    rows = []
    for key, value, origin in chosen_values(prepared.resolved, everything=True):
        part, _, name = key.rpartition(".")
        rows.append(ConfigRow(part, name, shown_value(value), origin))
    return tuple(rows)
