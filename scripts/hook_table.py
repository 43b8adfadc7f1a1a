"""Write docs/hooks.md: all hooks of the API and the built-in plugins that implement them.

python scripts/hook_table.py            # writes the page
python scripts/hook_table.py --check    # exits with 1 if the page is out of date
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from ascend_run.plugin_api import HookKind, Point, hookspecs
from ascend_run.plugin_api.hook_kinds import HookPoint
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.plugin_api.implementations import implementations
from ascend_run.registry.discovery import Catalogue, discover

PAGE = Path(__file__).parent.parent / "docs/hooks.md"
HEAD = """# Hooks

    ascend-run plan --config run.toml     # which plugin implements which hook in this run

To change a part of a run, implement its hook [in a plugin](plugin-authors.md). This page lists
every hook of the API, in the order in which a run calls those of one part. For arguments and
return values, see the specifications in `ascend_run/plugin_api/hookspecs.py`; for the four kinds,
see [architecture](architecture.md#hooks). A plugin that implements a provider hook makes its
claim; a platform makes only the claim of `ascend_device`, since it is called last, as the default.
A torch-free hook is called before torch is imported. A hook that no built-in plugin implements yet
names the [planned feature](#planned-features) that will.

"""
PLANNED: Final[Mapping[str, str]] = {
    "fsdp2": "data parallelism with sharded parameters, gradients and optimizer state, by torch's "
    "`fully_shard` (`--use-torch-fsdp2`)",
    "moe-routing-replay": "reuse the experts that the router chose for the same tokens in an "
    "earlier forward, in reinforcement learning",
    "ppo": "reinforcement learning with a critic: a value for each token, from a head beside the "
    "output layer (`--stage ray_ppo`)",
    "tp-2d": "tensor parallelism over two axes, with hidden states that are sharded over one of "
    "them (`--tp-2d`)",
}
"""Feature without a plugin -> what it will do, with its flag in other systems. Each is the first to
implement some hook."""


def users(catalogue: Catalogue) -> dict[str, list[str]]:
    """Return hook -> the names of the built-in plugins that implement it."""
    ours = catalogue.load(name for name, found in catalogue.items() if found.first_party)
    found: dict[str, list[str]] = {name: [] for name in hook_points()}
    for name, plugin in sorted({p.manifest.name: p for p in ours.values()}.items()):
        for hook in implementations(plugin):
            found[hook].append(name)
    return found


def unfounded(points: Mapping[str, HookPoint], used_by: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a message for each hook without a built-in or planned plugin, or with both; and for
    each planned feature that no hook names."""
    awaited = {point.first_user for point in points.values()}
    problems = [
        f"no hook names {name!r}: delete it from PLANNED" for name in PLANNED if name not in awaited
    ]
    for name, point in points.items():
        if not used_by[name] and point.first_user is None:
            problems.append(
                f"{name} has no plugin: set first_user in its specification to the feature that "
                "will implement it first, or delete the hook"
            )
        elif used_by[name] and point.first_user is not None:
            problems.append(
                f"{name} has a plugin ({', '.join(used_by[name])}): delete first_user="
                f"{point.first_user!r} from its specification"
            )
        elif point.first_user is not None and point.first_user not in PLANNED:
            problems.append(
                f"{name} names {point.first_user!r} as first_user, which is not in PLANNED: add it "
                "there with what it will do, or delete the hook"
            )
    return problems


def page(catalogue: Catalogue) -> str:
    """Return the page as text."""
    used_by = users(catalogue)
    lines = [HEAD]
    for part in Point:
        lines += [f"## {part}", "", "| hook | kind | claim | torch-free | called | plugins |"]
        lines.append("|---|---|---|---|---|---|")
        for point in hook_points().values():
            if point.point is part:
                cells = (*_facts(point), ", ".join(_linked(used_by[point.name], catalogue)))
                if point.first_user is not None:
                    cells = (*cells[:-1], f"planned: {point.first_user}")
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += ["## Planned features", "", "| feature | what it will do |", "|---|---|"]
    lines += [f"| {name} | {what} |" for name, what in PLANNED.items()]
    return "\n".join([*lines, ""])


def _facts(point: HookPoint) -> tuple[str, ...]:
    claim = f"`{point.claim}`" if point.claim else ""
    torch_free = "yes" if point.torch_free else ""
    return (f"`{point.name}`", str(point.kind), claim, torch_free, called(point))


def called(point: HookPoint) -> str:
    """Return when a hook is called: the text after ``When:``; for a listener, its summary line."""
    contract = inspect.getdoc(getattr(hookspecs, point.name)) or ""
    marked = re.search(r"^When: (.+?)(?:\n\n|\Z)", contract, re.DOTALL | re.MULTILINE)
    if marked is None and point.kind is not HookKind.LISTENER:
        raise ValueError(f"{point.name}: its docstring does not say when it is called")
    when = " ".join((marked[1] if marked else contract.partition("\n\n")[0]).split())
    return re.split(r"\. |\.$", when)[0].removeprefix("Called ")


def _linked(names: Sequence[str], catalogue: Catalogue) -> Iterator[str]:
    for name in names:
        yield f"[{name}](plugins/{catalogue[name].category}/{name}.md)"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is outdated.")
@click.argument("target", type=click.Path(path_type=Path), default=PAGE)
def command(check: bool, target: Path) -> None:
    """Write the page of hooks."""
    new = page(discover())
    if not check:
        target.write_text(new, encoding="utf-8")
    elif not target.exists() or target.read_text(encoding="utf-8") != new:
        click.echo(f"{target} is out of date; run scripts/hook_table.py", err=True)
        sys.exit(1)


if __name__ == "__main__":
    command()
