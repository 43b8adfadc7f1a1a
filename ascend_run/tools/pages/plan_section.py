"""A diagram of the plan: points of the run, plugins at their hooks, nested wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ascend_run.plugin_api import Point
from ascend_run.prepare.plan.records import Plan, PlannedPlugin
from ascend_run.registry.kinds import Kind

from .hook_points import Seam, free_hooks, seams_by_point
from .markup import Markup, details, element, join, table
from .run_folder import RunData
from .run_records import LockedPlugin

_COLOURS: Final = 5
_GREY: Final = 5
_BASE: Final = (Point.COMM, Point.RUN)
"""Points that all others depend on; drawn below the flow."""
_KIND_MEANS: Final = {
    "provider": "provided by one plugin: the first that returns a value",
    "wrapper": "each wraps the previous ones; innermost first",
    "contribution": "all return values are merged",
    "listener": "notified of events, in this order",
}


def plan_section(run: RunData) -> Markup | None:
    """Return the diagram and its tables; None if the run has no plan."""
    plan = run.plan
    if not plan.plugins and not plan.hooks:
        return None
    colours = _colours(plan.plugins)
    points = seams_by_point(plan.hooks)
    flow = [_point(point, seams, colours) for point, seams in points.items() if point not in _BASE]
    base = [_point(point, points[point], colours) for point in _BASE]
    return join(
        [
            _legend(plan.plugins, colours),
            element(
                "div",
                element("ol", *flow, class_="flow", aria_label="The flow of a run"),
                element("div", *base, class_="base"),
                class_="drawing",
            ),
            _notes(plan),
            details("Plugins: versions, claims, and why each is enabled", _plugin_table(run)),
            details("Hooks: owners of each, and the reason for their order", _hook_table(plan)),
            _forwards(plan),
        ]
    )


def _colours(plugins: Sequence[PlannedPlugin]) -> dict[str, int]:
    """A colour for each enabled feature; family, task and platform are grey."""
    features = [plugin for plugin in plugins if plugin.kind == Kind.FEATURE]
    grey = {plugin.name: _GREY for plugin in plugins}
    return grey | {plugin.name: i % _COLOURS for i, plugin in enumerate(features)}


def _notes(plan: Plan) -> Markup | None:
    """Notes that the diagram does not show."""
    idle = [
        f"{name} has no effect in this run, because {condition}"
        for name, condition in plan.idle.items()
    ]
    patching = [f"{name} patches functions of other packages" for name in plan.patching]
    environment = [f"environment: {name}={value}" for name, value in plan.environment.items()]
    lines = [element("li", line) for line in (*idle, *patching, *environment)]
    return element("ul", *lines, class_="note") if lines else None


def _point(point: Point, seams: list[Seam], colours: Mapping[str, int]) -> Markup:
    body = [_seam(seam, colours) for seam in seams]
    free = [part for hook in free_hooks(point, seams) for part in (", ", element("code", hook))]
    own = element("p", "built-in: ", *free[1:], class_="own") if free else None
    return element(
        "section" if point in _BASE else "li",
        element("h3", str(point)),
        element("div", *body, class_="seams") if body else None,
        own,
        class_="point",
    )


def _seam(seam: Seam, colours: Mapping[str, int]) -> Markup:
    head = element(
        "p",
        element("code", seam.name),
        " ",
        element("span", seam.kind, class_="kind", title=_KIND_MEANS.get(seam.kind)),
        class_="hook",
    )
    return element("div", head, _boxes(seam, colours), class_="seam")


def _boxes(seam: Seam, colours: Mapping[str, int]) -> Markup:
    if seam.kind != "wrapper":
        chips = [_box(owner, colours) for owner in seam.owners]
        return element("div", *chips, class_=f"chips {_class_name(seam.kind)}")
    nested = _box(str(seam.inside), colours, core=True)
    for depth, owner in enumerate(seam.owners, start=1):
        nested = _box(owner, colours, nested, order=depth)
    return element("div", nested, class_="chips")


def _box(
    name: str,
    colours: Mapping[str, int],
    inside: Markup | None = None,
    *,
    core: bool = False,
    order: int | None = None,
) -> Markup:
    kinds = ["box"]
    if inside is not None:
        kinds.append("wrapper")
    if name in colours:
        kinds.append(f"plugin p{colours[name]}")
    elif core:
        kinds.append("core")
    label = element(
        "span",
        element("span", str(order), class_="order", title="order of wrapping") if order else None,
        name,
        class_="label",
    )
    owner = name if name in colours else None
    return element("div", label, inside, class_=" ".join(kinds), data_plugin=owner)


def _legend(plugins: Sequence[PlannedPlugin], colours: Mapping[str, int]) -> Markup:
    keys = []
    for plugin in plugins:
        keys.append(
            element(
                "li",
                element(
                    "button",
                    element("span", plugin.name, class_="label"),
                    type="button",
                    class_=f"box plugin p{colours[plugin.name]}",
                    data_plugin=plugin.name,
                    aria_pressed="false",
                    title="show where it acts",
                ),
                element("span", plugin.summary, class_="summary"),
            )
        )
    return element("ul", *keys, class_="plugins", aria_label="Plugins of the run, innermost first")


def _plugin_table(run: RunData) -> Markup:
    head = ("plugin", "version", "summary", "numerics", "claims", "hooks", "why")
    rows = []
    for plugin in run.plan.plugins:
        locked = run.lock.get(plugin.name, LockedPlugin())
        version = plugin.version or locked.version
        distribution = plugin.distribution or locked.distribution
        rows.append(
            [
                plugin.name,
                f"{distribution} {version}".strip(),
                plugin.summary,
                plugin.numerics,
                ", ".join(plugin.claims),
                ", ".join(plugin.hooks),
                plugin.why,
            ]
        )
    return table(head, rows)


def _hook_table(plan: Plan) -> Markup:
    rows = [
        [element("code", hook.hook), hook.kind, ", ".join(hook.owners), hook.why]
        for hook in plan.hooks
    ]
    return table(("hook", "kind", "owners, innermost or first called first", "why"), rows)


def _forwards(plan: Plan) -> Markup | None:
    """The links around forwards; None where there are none, or where an earlier version planned."""
    if not plan.forwards:
        return None
    rows = [
        [
            element("code", chain.module),
            ", ".join(chain.links) or "none",
            ", ".join(chain.compilers),
        ]
        for chain in plan.forwards
    ]
    head = ("module", "links, innermost first", "compiled, or kept out of graphs, by")
    return details("Forwards: the links around each kind of module", table(head, rows))


def _class_name(kind: str) -> str | None:
    return kind if kind in _KIND_MEANS else "other"
