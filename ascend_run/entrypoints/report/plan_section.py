"""The plan drawn: the six points, the plugins at their hooks, wrappers nested as they wrap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_run.plugin_api import Point

from .hook_points import Seam, free_hooks, seams_by_point
from .markup import Markup, details, element, join, table
from .run_folder import RunData, items, mapping

_COLOURS: Final = 5
_GREY: Final = 5
_BASE: Final = (Point.COMM, Point.RUN)
"""Points that serve all others: drawn beneath the flow."""
_KIND_MEANS: Final = {
    "provider": "one plugin provides it: the first that returns a value",
    "wrapper": "each wraps the ones before it; innermost first",
    "contribution": "what all return is merged",
    "listener": "called at events, in this order",
}


def plan_section(run: RunData) -> Markup | None:
    """The drawing with its tables; None where the run has no plan."""
    plugins = items(run.plan.get("plugins"))
    if not plugins and not items(run.plan.get("hooks")):
        return None
    colours = _colours(plugins)
    points = seams_by_point(run.plan)
    flow = [_point(point, seams, colours) for point, seams in points.items() if point not in _BASE]
    base = [_point(point, points[point], colours) for point in _BASE]
    return join(
        [
            _legend(plugins, colours),
            element(
                "div",
                element("ol", *flow, class_="flow", aria_label="The flow of a run"),
                element("div", *base, class_="base"),
                class_="drawing",
            ),
            _notes(run.plan),
            details("Plugins: versions, claims, and why each is there", _plugin_table(run)),
            details("Hooks: who owns each, and why in this order", _hook_table(run)),
        ]
    )


def _colours(plugins: list[Mapping[str, Any]]) -> dict[str, int]:
    """A colour for each feature that was enabled; family, task and platform are grey."""
    features = [p for p in plugins if p.get("kind", "feature") == "feature"]
    grey = {str(plugin.get("name")): _GREY for plugin in plugins}
    return grey | {str(p.get("name")): i % _COLOURS for i, p in enumerate(features)}


def _notes(plan: Mapping[str, Any]) -> Markup | None:
    """What the drawing cannot show."""
    idle = [
        f"{name} changes nothing in this run, as {condition}"
        for name, condition in mapping(plan.get("idle")).items()
    ]
    patching = [
        f"{name} replaces functions of others for the run" for name in _list(plan.get("patching"))
    ]
    environment = [
        f"environment: {name}={value}" for name, value in mapping(plan.get("environment")).items()
    ]
    lines = [element("li", line) for line in (*idle, *patching, *environment)]
    return element("ul", *lines, class_="note") if lines else None


def _point(point: Point, seams: list[Seam], colours: Mapping[str, int]) -> Markup:
    body = [_seam(seam, colours) for seam in seams]
    free = [part for hook in free_hooks(point, seams) for part in (", ", element("code", hook))]
    own = element("p", "ascend-run's own: ", *free[1:], class_="own") if free else None
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


def _legend(plugins: list[Mapping[str, Any]], colours: Mapping[str, int]) -> Markup:
    keys = []
    for plugin in plugins:
        name = str(plugin.get("name"))
        keys.append(
            element(
                "li",
                element(
                    "button",
                    element("span", name, class_="label"),
                    type="button",
                    class_=f"box plugin p{colours[name]}",
                    data_plugin=name,
                    aria_pressed="false",
                    title="show where it acts",
                ),
                element("span", str(plugin.get("summary", "")), class_="summary"),
            )
        )
    return element("ul", *keys, class_="plugins", aria_label="Plugins of the run, innermost first")


def _plugin_table(run: RunData) -> Markup:
    head = ("plugin", "version", "summary", "numerics", "claims", "hooks", "why")
    rows = []
    for plugin in items(run.plan.get("plugins")):
        name = str(plugin.get("name"))
        locked = mapping(run.lock.get(name))
        version = plugin.get("version") or locked.get("version") or ""
        distribution = plugin.get("distribution") or locked.get("distribution") or ""
        rows.append(
            [
                name,
                f"{distribution} {version}".strip(),
                str(plugin.get("summary", "")),
                str(plugin.get("numerics", "")),
                _words(plugin.get("claims")),
                _words(plugin.get("hooks")),
                str(plugin.get("why", "")),
            ]
        )
    return table(head, rows)


def _hook_table(run: RunData) -> Markup:
    rows = [
        [
            element("code", str(hook.get("hook", ""))),
            str(hook.get("kind", "")),
            _words(hook.get("owners")),
            str(hook.get("why", "")),
        ]
        for hook in items(run.plan.get("hooks"))
    ]
    return table(("hook", "kind", "owners, innermost or first asked first", "why"), rows)


def _words(value: Any) -> str:
    return ", ".join(_list(value)) if isinstance(value, list) else str(value or "")


def _list(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _class_name(kind: str) -> str | None:
    return kind if kind in _KIND_MEANS else "other"
