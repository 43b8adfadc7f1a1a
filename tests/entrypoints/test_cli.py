from __future__ import annotations

import subprocess
import sys
import types

import click
import pytest

from ascend_run.entrypoints import cli
from ascend_run.entrypoints.commands import OWN, TRAIN, Command, commands
from ascend_run.plugin_api import ConfigError, RankFailure
from tests.support.command_line import imported_by, top


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """A train command that only notes the words it was given."""
    calls: list[tuple[str, ...]] = []

    @click.command("train", context_settings={"ignore_unknown_options": True})
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    def command(words: tuple[str, ...]) -> None:
        calls.append(words)

    replace_train(monkeypatch, command)
    return calls


def replace_train(monkeypatch: pytest.MonkeyPatch, command: click.Command) -> None:
    module = types.ModuleType("a_train_module")
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_train_module", module)
    own = {**OWN, TRAIN: Command("a_train_module:command", "Train.")}
    monkeypatch.setattr("ascend_run.entrypoints.commands.OWN", own)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--enable", "ulysses,gmm"),
        ("train.lr=1",),
        ("--config", "run.toml", "train.lr=1"),
        ("--enable", "plugins"),
    ],
    ids=str,
)
def test_what_names_no_command_trains(
    trained: list[tuple[str, ...]], words: tuple[str, ...]
) -> None:
    assert cli.run(words) == 0
    assert trained == [words]


def test_train_may_be_named(trained: list[tuple[str, ...]]) -> None:
    assert cli.run(["train", "--nproc", "2"]) == 0
    assert trained == [("--nproc", "2")]


def test_a_word_that_is_neither_command_nor_setting_trains_nothing(
    trained: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["plugin"]) == 2
    assert trained == []
    assert "did you mean 'plugins'?" in capsys.readouterr().err


def test_help_shows_the_options_of_training_and_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["--help"]) == 0

    shown = capsys.readouterr().out
    for word in ("--enable", "--config", "--platform", "--nproc", "--version", *commands()):
        assert word in shown, word


@pytest.mark.parametrize("name", [*commands()])
def test_each_command_is_listed_with_the_first_line_of_its_help(name: str) -> None:
    context = click.Context(cli.program)
    command = cli.program.get_command(context, name)  # type: ignore[attr-defined]

    assert command.name == name
    assert commands()[name].summary == (command.help or "").strip().splitlines()[0]


def test_a_refusal_is_one_message_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def refusing() -> None:
        raise ConfigError("this run cannot start", ["one thing", "another"])

    replace_train(monkeypatch, refusing)

    assert cli.run([]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: this run cannot start:\n  one thing\n  another\n"
    assert shown.out == ""


def test_the_exit_code_is_that_of_the_kind_of_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def failing() -> None:
        raise RankFailure("rank 1 was killed")

    replace_train(monkeypatch, failing)

    assert cli.run([]) == 1


def test_ctrl_c_ends_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    replace_train(monkeypatch, interrupted)

    assert cli.run([]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise ZeroDivisionError("our own")

    replace_train(monkeypatch, broken)

    with pytest.raises(ZeroDivisionError):
        cli.run([])


def test_a_command_may_choose_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @click.pass_context
    def choosing(ctx: click.Context) -> None:
        ctx.exit(7)

    replace_train(monkeypatch, choosing)

    assert cli.run([]) == 7


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plugins", "--colour"]) == 2
    assert "No such option" in capsys.readouterr().err


QUICK = {"ascend_run", "click"}


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        pytest.param(["--version"], QUICK, id="--version"),
        pytest.param(["--help"], QUICK, id="--help"),
        pytest.param(["completion", "zsh"], QUICK, id="completion zsh"),
        pytest.param(["plugins"], QUICK, id="plugins"),
        pytest.param(["plugins", "--json"], QUICK, id="plugins --json"),
    ],
)
def test_what_must_be_quick_imports_only_these_packages(
    arguments: list[str], allowed: set[str]
) -> None:
    code, modules = imported_by(arguments)

    assert code == 0
    assert {top(name) for name in modules} == allowed


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"]], ids=" ".join)
def test_what_must_be_quick_imports_nothing_of_core(arguments: list[str]) -> None:
    _, modules = imported_by(arguments)

    assert not {name for name in modules if name.startswith("ascend_run.core.")}


def test_the_installed_program_runs() -> None:
    program = "from ascend_run.entrypoints.cli import main; main()"

    process = subprocess.run(
        [sys.executable, "-c", program, "--version"], capture_output=True, text=True, timeout=60
    )

    assert process.returncode == 0
    assert process.stdout == "ascend-run 0.1.0\n"
    assert process.stderr == ""
