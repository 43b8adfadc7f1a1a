from __future__ import annotations

import json
from typing import Any

import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.tools.plugins.command import markdown_table
from tests.support.fake_distributions import plugin_source
from tests.support.installed import Install, offer

CANARY = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"

OPTIONS = """
import attrs
from ascend_run.plugin_api import Condition, LegacyFlag, Manifest, Numerics, Support, hookimpl

@attrs.frozen(kw_only=True)
class Base:
    inherited: str = "x"
    '''From the class below.'''

@attrs.frozen(kw_only=True)
class Options(Base):
    every: int = 1
    '''One layer in this many.

    Unit: layers.'''
    names: tuple[str, ...] = attrs.field(factory=tuple)
    path: str

class Plugin:
    '''Does nothing, at length.'''

    manifest = Manifest(
        name="ring", aliases=("circle",), summary="a ring",
        requires=("base", Condition("a.b", ">", 1)),
        conflicts={"wheel": "both cut"}, after=("base",), numerics=Numerics.ROUNDING,
        platforms={"cpu": Support.REAL, "npu": Support.EMULATED, "cuda": Support.REFUSED},
        legacy_flags=(LegacyFlag(flag="--ring"),), source="arXiv:0000.00000",
    )
    config_class = Options

    @hookimpl
    def ascend_layer(self): ...
"""


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 0
    return capsys.readouterr().out


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(output_of(capsys, "plugins", "--json"))}


def test_ours_are_listed_with_their_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    row = listed(capsys)["cpu"]

    assert row["kind"] == "platform"
    assert row["claims"] == ["platform"]
    assert row["platforms"]["cpu"] == "real"
    assert row["distribution"] == "ascend-run"
    assert row["broken"] is None


@pytest.mark.parametrize("command", [["plugins"], ["plugins", "list"]], ids=" ".join)
def test_the_table_shows_every_plugin_with_kind_platforms_and_version(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    lines = output_of(capsys, *command).splitlines()

    (cpu,) = [line for line in lines if line.startswith("cpu ")]
    assert "platform" in cpu
    assert cpu.endswith("ascend-run 0.1.0")
    assert lines[0].split()[:3] == ["name", "kind", "summary"]


def test_a_package_that_no_one_named_is_listed_without_running(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = offer(install, "ring", CANARY + plugin_source("ring"), version="3.1")

    row = listed(capsys)["ring"]
    table = output_of(capsys, "plugins")

    assert (row["distribution"], row["version"]) == ("ascend-run-ring", "3.1")
    assert "summary" not in row
    assert "ascend-run-ring 3.1" in table
    assert not (folder / "ran").exists()


def test_showing_a_package_is_the_consent_to_run_it(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = offer(install, "ring", CANARY + plugin_source("ring"))

    assert "a plugin named ring" in output_of(capsys, "plugins", "show", "ring")
    assert (folder / "ran").exists()


def test_what_is_broken_is_listed_with_its_reason(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("ring-one", {"ascend_run.plugins": {"ring": "a:A"}})
    install("ring-two", {"ascend_run.plugins": {"ring": "b:B"}})
    bad = install("bad-metadata", {"ascend_run.plugins": {"x": "x:X"}})
    entry_points = bad / "bad_metadata-1.0.dist-info/entry_points.txt"
    entry_points.write_text("[ascend_run.plugins]\nno equals sign here\n")

    table = output_of(capsys, "plugins")

    assert "broken (affects only runs that use them):" in table
    assert "ring-one 1.0" in table
    assert "ring-two 1.0" in table
    assert "bad-metadata: its entry points cannot be read" in table


def test_one_plugin_is_shown_with_all_that_it_says(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {"ring": "fake_ring:Plugin", "circle": "fake_ring:Plugin"}
    install("rings", {"ascend_run.plugins": points}, {"fake_ring.py": OPTIONS})

    page = output_of(capsys, "plugins", "show", "circle")
    shown = json.loads(output_of(capsys, "plugins", "show", "circle", "--json"))

    assert shown["name"] == "ring"
    assert shown["requires"] == ["base", "a.b > 1"]
    assert shown["hooks"] == {"ascend_layer": "wrapper"}
    assert shown["options"] == [
        {
            "name": "inherited",
            "type": "str",
            "default": "'x'",
            "help": "From the class below.",
        },
        {
            "name": "every",
            "type": "int",
            "default": "1",
            "help": "One layer in this many. Unit: layers.",
        },
        {"name": "names", "type": "tuple[str, ...]", "default": "()", "help": ""},
        {"name": "path", "type": "str", "default": "required", "help": ""},
    ]
    for words in (
        "Does nothing, at length.",
        "rounding",
        "wheel: both cut",
        "npu (emulated), cuda (refused)",
        "--ring",
        "every: int = 1",
        "One layer in this many.",
    ):
        assert words in page, words


def test_an_unknown_name_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "show", "pretrian"]) == 2
    assert "nearest: pretrain" in capsys.readouterr().err


def test_the_markdown_table_leads_each_of_ours_to_its_page(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(install, "relay")

    lines = output_of(capsys, "plugins", "--markdown").splitlines()

    start = "| [cpu](docs/plugins/platforms/cpu.md) | platforms |"
    assert any(line.startswith(start) for line in lines)
    assert not any("relay" in line.split("|")[1] for line in lines if line.startswith("|"))


def test_platforms_are_marked_by_how_they_run_there() -> None:
    row = {
        "name": "x",
        "kind": "feature",
        "summary": "s",
        "numerics": "bitwise",
        "platforms": {"cpu": "real", "npu": "emulated", "cuda": "unverified", "tpu": "refused"},
        "first_party": True,
        "category": "operators",
        "broken": None,
    }

    assert "| cpu npu~ cuda? |" in markdown_table([row])
