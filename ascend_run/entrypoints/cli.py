"""``ascend-run``: trains, unless its first argument is another command. Imports little but click.

Commands are listed by ``commands`` and imported when they are called.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Mapping, Sequence

import click
from click.shell_completion import CompletionItem

from ascend_run import __version__

from .commands import TRAIN, Command, command_named, commands


class Program(click.Group):
    """The group of all commands; options and ``key=value`` arguments without a command train."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = _command(ctx, cmd_name)
        return None if command is None else command.load()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own_options = {"--help", "-h", "--version"}
        completing_first_word = ctx.resilient_parsing and not args
        if completing_first_word or (args and args[0] in own_options):
            return super().parse_args(ctx, args)
        if args and not args[0].startswith("-") and "=" not in args[0]:
            if _command(ctx, args[0]):
                return super().parse_args(ctx, args)
            raise click.UsageError(_unknown_command(args[0], _commands(ctx)), ctx)
        return super().parse_args(ctx, [TRAIN, *args])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS] [SECTION.KEY=VALUE]...", "| COMMAND ..."]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        train = self.get_command(ctx, TRAIN)
        assert train is not None, "train is one of the commands"
        own = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        options = [p for p in train.get_params(ctx) if isinstance(p, click.Option)]
        parameters = [option for option in options if not own & {*option.opts}]
        records = [p.get_help_record(ctx) for p in (*parameters, *self.get_params(ctx))]
        with formatter.section("Options"):
            formatter.write_dl([record for record in records if record is not None])
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.summary) for name, command in _commands(ctx).items()]
            )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if not incomplete.startswith("-"):
            return [
                CompletionItem(name, help=command.summary)
                for name, command in _commands(ctx).items()
                if name.startswith(incomplete)
            ]
        train = self.get_command(ctx, TRAIN)
        return super().shell_complete(ctx, incomplete) + (
            train.shell_complete(ctx, incomplete) if train else []
        )


def _command(ctx: click.Context, name: str) -> Command | None:
    """A command, found once per command line."""
    key = f"{__name__}.command.{name}"
    if key not in ctx.meta:
        ctx.meta[key] = command_named(name)
    found: Command | None = ctx.meta[key]
    return found


def _commands(ctx: click.Context) -> Mapping[str, Command]:
    """The installed commands, read once per command line."""
    key = f"{__name__}.commands"
    if key not in ctx.meta:
        ctx.meta[key] = commands()
    found: Mapping[str, Command] = ctx.meta[key]
    return found


def _unknown_command(word: str, known: Collection[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return (
        f"'{word}' is neither a command nor a setting; {hint}"
        f"commands: {', '.join(known)}; a setting is SECTION.KEY=VALUE"
    )


@click.command("ascend-run", cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def program() -> None:
    """Train large language models with the plugins that you name.

    \b
    ascend-run --enable ulysses,gmm --config run.toml train.train_iters=100
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Errors other than the user's are raised."""
    try:
        result = program.main(
            args=None if arguments is None else [*arguments],
            prog_name="ascend-run",
            standalone_mode=False,
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except Exception as error:
        # Imported late: importing the plugin API takes time, and most commands succeed.
        from ascend_run.plugin_api.errors import AscendRunError

        if not isinstance(error, AscendRunError):
            raise
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    return result if isinstance(result, int) else 0


def main() -> None:
    """The console script."""
    code = run()
    gc.freeze()  # skips a useless garbage collection when the process ends
    sys.exit(code)
