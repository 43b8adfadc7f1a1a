"""Commands of other packages: found by metadata, imported when they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.entrypoints.commands import commands
from tests.support.installed import Install

HELLO = """
import click, pathlib
pathlib.Path(__file__).with_name("ran").touch()

@click.command("hello")
@click.argument("name")
def command(name):
    "Greet."
    click.echo(f"hello, {name}")
"""


def add(install: Install, package: str, command: str, source: str = HELLO) -> None:
    module = f"fake_{package}"
    points = {"ascend_run.commands": {command: f"{module}:command"}}
    install(f"ascend-run-{package}", points, {f"{module}.py": source})


def test_a_third_partys_command_runs_and_is_listed_without_import(
    install: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    add(install, "greeting", "hello")
    assert run(["--help"]) == 0
    assert "hello       Of ascend-run-greeting 1.0." in capsys.readouterr().out
    assert not _ran(tmp_path)
    assert run(["hello", "world"]) == 0
    assert capsys.readouterr().out == "hello, world\n"
    assert _ran(tmp_path)


def test_a_name_of_ours_stays_ours_and_one_of_two_others_is_neithers(install: Install) -> None:
    add(install, "usurper", "plan")
    add(install, "usurper2", "train")
    add(install, "one", "hello")
    add(install, "two", "hello")
    found = commands()
    assert found["plan"].value == "ascend_run.tools.plan.command:command"
    assert found["train"].value == "ascend_run.entrypoints.train:command"
    assert "hello" not in found


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('no')", "cannot be imported: RuntimeError: no"),
        ("command = 5", "is not a click command: 5"),
    ],
)
def test_a_command_that_cannot_be_had_is_one_message(
    install: Install, capsys: pytest.CaptureFixture[str], source: str, message: str
) -> None:
    add(install, "broken", "hello", source)
    assert run(["hello"]) == 2
    assert message in capsys.readouterr().err


def _ran(folder: Path) -> bool:
    return any(folder.glob("site-*/ran"))
