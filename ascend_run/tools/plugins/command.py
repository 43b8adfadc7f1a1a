"""The command line of ``ascend-run plugins``."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import click
from click.shell_completion import CompletionItem

from ascend_run.tools.terminal.run_options import plugin_names


@click.group("plugins", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print the built-in plugins as a Markdown table.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, markdown: bool) -> None:
    """List the plugins, or show one.

    Plugins are listed by their static manifest, name and version: the code of a plugin is not
    imported unless you name it.
    """
    if ctx.invoked_subcommand is None:
        _print_list(as_json, markdown)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print the built-in plugins as a Markdown table.")
def list_command(as_json: bool, markdown: bool) -> None:
    """List the plugins."""
    _print_list(as_json, markdown)


def _complete_name(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    found = plugin_names()
    return [CompletionItem(n, help=source) for n, source in found if n.startswith(incomplete)]


@command.command("show")
@click.argument("name", shell_complete=_complete_name)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(name: str, as_json: bool) -> int:
    """Show a plugin's manifest, options and hooks; imports it.

    Checks its hooks, and times its import in a new process. The exit code is 1 if a check of its
    hooks finds a problem.
    """
    import json

    from ascend_run.registry.discovery import discover

    from .showing import show_page, shown_plugin, shown_values

    catalogue = discover()
    plugin = catalogue.load([name])[name]
    shown = shown_plugin(catalogue[name], plugin)
    text = json.dumps(shown_values(shown), indent=2) if as_json else "\n".join(show_page(shown))
    click.echo(text)
    return int(bool(shown.hook_problems))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection, which takes a tenth of the time of a listing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _print_list(as_json: bool, markdown: bool) -> None:
    with _without_collections():
        from ascend_run.registry.discovery import discover

        from .listing import list_page, listing, markdown_table

        catalogue = discover()
        rows = listing(catalogue)
    if as_json:
        import json  # late: the table needs neither this nor attrs

        click.echo(json.dumps([row._asdict() for row in rows], indent=2))
    elif markdown:
        click.echo(markdown_table(rows), nl=False)
    else:
        click.echo("\n".join(list_page(rows, catalogue.unreadable)))
