"""``ascend-run completion``: print the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_USE = {
    "bash": 'eval "$(ascend-run completion bash)"     # in ~/.bashrc',
    "zsh": 'eval "$(ascend-run completion zsh)"      # in ~/.zshrc',
    "fish": "ascend-run completion fish | source     # in ~/.config/fish/config.fish",
}


@click.command("completion", epilog="\b\n" + "\n".join(_USE.values()))
@click.argument("shell", type=click.Choice([*_USE]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the shell's completion script.

    It completes commands, options, and the names of installed plugins.
    """
    completion = get_completion_class(shell)
    assert completion is not None, f"click completes {shell}"
    name = "ascend-run"
    program = ctx.find_root().command
    click.echo(completion(program, {}, name, "_ASCEND_RUN_COMPLETE").source())
