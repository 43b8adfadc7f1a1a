"""The options that say what a run is: the same words for training, planning and checking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from ascend_run.registry.kinds import Kind

F = TypeVar("F", bound=Callable[..., Any])


def plugin_names(kind: Kind | None = None) -> list[tuple[str, str]]:
    """(name, what offers it) of every installed plugin, or of one kind; imports none of them."""
    from ascend_run.registry.discovery import discover

    found = discover()
    return [(n, c.offered_by) for n, c in found.items() if kind is None or c.kind is kind]


def complete_feature_list(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the last word of a comma-separated list of features."""
    from ascend_run.registry.kinds import Kind

    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [
        CompletionItem(f"{before}{comma}{name}", help=source)
        for name, source in plugin_names(Kind.FEATURE)
        if name.startswith(last) and name not in taken
    ]


def _completer(kind_name: str) -> Callable[..., list[CompletionItem]]:
    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from ascend_run.registry.kinds import Kind

        return [
            CompletionItem(name, help=source)
            for name, source in plugin_names(Kind(kind_name))
            if name.startswith(incomplete)
        ]

    return complete


complete_platform = _completer("platform")
complete_task = _completer("task")


def _split(
    ctx: click.Context, param: click.Parameter, given: Sequence[str]
) -> tuple[str, ...] | None:
    """Names from ``--enable a,b --enable c``; None where the option was not given."""
    if not given:
        return None
    names = (name.strip() for part in given for name in part.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def split_names(
    ctx: click.Context, param: click.Parameter, given: Sequence[str]
) -> tuple[str, ...]:
    """As ``_split``; none where the option was not given."""
    return _split(ctx, param, given) or ()


def run_options(command: F) -> F:
    """Give a command ``file``, ``enable``, ``level``, ``disable``, ``platform``, ``task`` and
    ``overrides``."""
    decorators = [
        click.option(
            "--config",
            "file",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Settings of the run, TOML or YAML.",
        ),
        click.option(
            "--enable",
            multiple=True,
            metavar="NAME,NAME",
            callback=_split,
            shell_complete=complete_feature_list,
            help="Feature plugins, in any order; in place of the file's 'enable'.",
        ),
        click.option(
            "--level",
            type=click.IntRange(min=0, max=2),
            help="Also the built-in features up to this level that can run; see: plan.",
        ),
        click.option(
            "--disable",
            multiple=True,
            metavar="NAME,NAME",
            callback=split_names,
            shell_complete=complete_feature_list,
            help="Features to leave out of the level's, and of the file's 'enable'.",
        ),
        click.option(
            "--platform",
            metavar="NAME",
            shell_complete=complete_platform,
            help="Device to run on; default: the file's, else cpu.",
        ),
        click.option(
            "--task",
            metavar="NAME",
            shell_complete=complete_task,
            help="What to train; default: the file's, else pretrain.",
        ),
        click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]..."),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command
