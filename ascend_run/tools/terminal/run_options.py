"""Command-line options that define a run, shared by train, plan and other commands."""

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
    """Return (name, distribution) of the installed plugins, or those of one kind; imports none."""
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
    """Parse names from ``--enable a,b --enable c``; None if the option was not given."""
    if not given:
        return None
    names = (name.strip() for part in given for name in part.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def split_names(
    ctx: click.Context, param: click.Parameter, given: Sequence[str]
) -> tuple[str, ...]:
    """Parse comma-separated names; empty if the option was not given."""
    return _split(ctx, param, given) or ()


def run_options(command: F) -> F:
    """Add the options ``file``, ``enable``, ``level``, ``disable``, ``platform``, ``task`` and
    ``overrides`` to a command."""
    decorators = [
        click.option(
            "--config",
            "file",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Config file, TOML or YAML.",
        ),
        click.option(
            "--enable",
            multiple=True,
            metavar="NAME,NAME",
            callback=_split,
            shell_complete=complete_feature_list,
            help="Feature plugins, in any order; overrides 'enable' of the config file.",
        ),
        click.option(
            "--level",
            type=click.IntRange(min=0, max=2),
            help="Also enable all built-in features up to this level that can run; see plan.",
        ),
        click.option(
            "--disable",
            multiple=True,
            metavar="NAME,NAME",
            callback=split_names,
            shell_complete=complete_feature_list,
            help="Features to leave out of the level and of 'enable' in the config file.",
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
    return _decorated(command, decorators)


def compared_model_options(command: F) -> F:
    """Add the options ``file``, ``model``, ``platform`` and ``task`` to a command that compares
    runs, of a tiny built-in model by default."""
    decorators = [
        click.option(
            "--config",
            "file",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Config file with your model and data; default: a tiny built-in model.",
        ),
        click.option(
            "--model",
            type=click.Choice(["dense", "moe"]),
            help="Built-in model; default: as needed.",
        ),
        click.option(
            "--platform", metavar="NAME", shell_complete=complete_platform, help="Device."
        ),
        click.option("--task", metavar="NAME", shell_complete=complete_task, help="What to train."),
    ]
    return _decorated(command, decorators)


def _decorated(command: F, decorators: Sequence[Callable[[F], F]]) -> F:
    """Apply decorators that are listed as they would stand above the command."""
    for decorate in reversed(decorators):
        command = decorate(command)
    return command
