"""``ascend-run``: trains, unless its first word is another command. Imports click and little else.

Each command is a module with a click object named ``command``, imported when it is asked for.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import click
from click.shell_completion import CompletionItem

from ascend_run import __version__

TRAIN: Final = "train"

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "completion": ("ascend_run.entrypoints.completion", "Print the shell's completion script."),
    "convert": (
        "ascend_run.entrypoints.convert",
        "Write a checkpoint in Hugging Face's form, or back.",
    ),
    "diff": (
        "ascend_run.entrypoints.diff.command",
        "Say where two runs part, and what differs between them.",
    ),
    "new-plugin": (
        "ascend_run.entrypoints.new_plugin.command",
        "Write a package with a plugin of your own, to start from.",
    ),
    "plan": ("ascend_run.entrypoints.plan", "Show what a run would be, before anything runs."),
    "plugins": ("ascend_run.entrypoints.plugins", "List the plugins, or show one."),
    "preprocess": (
        "ascend_run.entrypoints.preprocess",
        "Tokenise text into Megatron's token files.",
    ),
    "report": (
        "ascend_run.entrypoints.report.command",
        "Write report.html of a finished, failed or running run.",
    ),
    TRAIN: ("ascend_run.entrypoints.train", "Train, with the plugins that you name."),
    "verify": (
        "ascend_run.entrypoints.verify.command",
        "Compare a run with the same run without its plugins, and with one rank.",
    ),
}
"""Command -> its module and the first line of its help, so that --help imports one module only."""


class Program(click.Group):
    """The group of all commands; options and ``key=value`` words without a command train."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command), f"{cmd_name}: no click command"
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own_options = {"--help", "-h", "--version"}
        completing_first_word = ctx.resilient_parsing and not args
        if completing_first_word or (args and (args[0] in COMMANDS or args[0] in own_options)):
            return super().parse_args(ctx, args)
        if args and not args[0].startswith("-") and "=" not in args[0]:
            raise click.UsageError(_unknown_command(args[0]), ctx)
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
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if not incomplete.startswith("-"):
            starting = [name for name in COMMANDS if name.startswith(incomplete)]
            return [CompletionItem(name, help=COMMANDS[name][1]) for name in starting]
        train = self.get_command(ctx, TRAIN)
        return super().shell_complete(ctx, incomplete) + (
            train.shell_complete(ctx, incomplete) if train else []
        )


def _unknown_command(word: str) -> str:
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return (
        f"'{word}' is neither a command nor a setting; {hint}"
        f"commands: {', '.join(COMMANDS)}; a setting is SECTION.KEY=VALUE"
    )


@click.command("ascend-run", cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def program() -> None:
    """Train large language models with the plugins that you name.

    \b
    ascend-run --enable ulysses,gmm --config run.toml train.train_iters=100
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; its exit code. What is not the user's doing keeps its traceback."""
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
        # Late: what refuses nothing does not wait for the plugin API's import.
        from ascend_run.plugin_api.errors import AscendRunError

        if not isinstance(error, AscendRunError):
            raise
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    return result if isinstance(result, int) else 0


def main() -> None:
    """The console script."""
    code = run()
    gc.freeze()  # the process ends: there is no use in searching its objects for garbage
    sys.exit(code)
