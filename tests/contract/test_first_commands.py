"""The command at the head of a plugin's page is one under which the plugin acts."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from ascend_run.entrypoints.cli import program
from ascend_run.entrypoints.commands import TRAIN
from ascend_run.prepare.config.raw import COMMAND_LINE, RawConfig, RawValue
from ascend_run.prepare.config.reading import read_raw
from ascend_run.prepare.prepare import resolve_run
from ascend_run.registry.discovery import discover
from ascend_run.testing.models import MOE
from benchmarks.campaigns.features import features
from tests.support.plugin_pages import page_of

from .test_docs import command_lines

RANKS = 64


def conditional() -> list[str]:
    """Return features that declare a condition under which they are idle."""
    classes = discover().load(features())
    return sorted(name for name, plugin in classes.items() if plugin.manifest.idle is not None)


def head_of(page: Path) -> RawConfig:
    """Return the first command of a page, for a model with experts."""
    context = click.Context(program, info_name="ascend-run")
    command = program.get_command(context, TRAIN)
    assert command is not None
    chosen = command.make_context(TRAIN, next(command_lines(page)), parent=context).params
    given = {
        "data.train": ["none"],
        "platform": "cpu",
        **MOE,
        **read_raw(None, chosen["overrides"]).values,
    }
    raw = RawConfig(
        values={
            key: value if isinstance(value, RawValue) else RawValue(value, "the test")
            for key, value in given.items()
        }
    )
    return raw.replacing(COMMAND_LINE, enable=[n for n in chosen["enable"] if n in discover()])


@pytest.mark.parametrize("name", conditional())
def test_the_first_command_of_its_page_lets_it_act(name: str) -> None:
    raw = head_of(page_of(discover(), name))
    assert name in raw.enable
    assert name not in resolve_run(raw, discover(), RANKS).idle
