"""The page of compatibility: written from manifests, and as old as they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ascend_run.plugin_api import Claim, Condition, Manifest, Support

ROOT = Path(__file__).parent.parent.parent
TOOL = ROOT / "scripts/compatibility.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compatibility_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def feature(
    name: str,
    claims: Sequence[Claim] = (),
    conflicts: Mapping[str, str] | None = None,
    requires: Sequence[Any] = (),
    platforms: Mapping[str, Support] | None = None,
) -> type:
    class Plugin:
        manifest = Manifest(
            name=name,
            summary="a test's",
            claims=tuple(claims),
            conflicts=conflicts or {},
            requires=tuple(requires),
            platforms=platforms or {"cpu": Support.REAL},
        )

    return Plugin


def run_tool(tool: ModuleType, *arguments: str | Path) -> Result:
    return CliRunner().invoke(tool.command, [str(argument) for argument in arguments])


def test_pairs_that_exclude_one_another_have_their_reason(tool: ModuleType) -> None:
    one = feature("one", claims=[Claim.EXPERTS])
    two = feature("two", claims=[Claim.EXPERTS])
    three = feature("three", conflicts={"one": "both sort tokens; leave three out"})
    text = tool.page([one, three, two], [])
    assert "| [one](plugins/one.md) | | no | no |" in text
    assert "| [two](plugins/two.md) | no | yes | |" in text
    assert "- **one** and **two**: 'one' and 'two' both claim 'experts'" in text
    assert "**three**: 'three' cannot run with 'one': both sort tokens; leave three out." in text


def test_an_excluded_pair_of_feature_and_task_has_its_reason(
    tool: ModuleType,
) -> None:
    task = feature("chats", claims=[Claim.TASK])
    one = feature("one", conflicts={"chats": "chats are apart already; leave one out"})
    text = tool.page([one, feature("two")], [], [task])
    assert "- **one** and **chats**: 'one' cannot run with 'chats': chats are apart" in text
    assert "**two** and" not in text
    assert "| [chats]" not in text


def test_what_is_required_is_no_reason_to_exclude(tool: ModuleType) -> None:
    base = feature("base")
    above = feature("above", requires=["base", Condition("model.num_layers", ">", 1, why="so")])
    lost = feature("lost", requires=["another"])
    text = tool.page([above, base, lost], [])
    assert "| no |" not in text
    assert "- **above**: the plugin **base**." in text
    assert "- **above**: `model.num_layers > 1`; so." in text


def test_platforms_that_are_not_named_are_refused(tool: ModuleType) -> None:
    some = feature("some", platforms={"cpu": Support.EMULATED})
    platforms = [feature(name, claims=[Claim.PLATFORM]) for name in ("npu", "cpu")]
    text = tool.page([some], platforms)
    assert "| | cpu | npu |" in text
    assert "| some | emulated | refused |" in text
    assert "- **some** and **npu**: 'some' does not run on platform 'npu'; it runs on: cpu" in text
    assert "- **some** and **cpu**" not in text


@pytest.mark.needs_plugins("gmm")
def test_the_tool_writes_what_it_checks(tool: ModuleType, tmp_path: Path) -> None:
    target = tmp_path / "compatibility.md"
    assert run_tool(tool, "--check", target).exit_code == 1
    assert run_tool(tool, target).exit_code == 0
    assert run_tool(tool, "--check", target).exit_code == 0
    assert "| [gmm](plugins/experts/gmm.md) |" in target.read_text()
    target.write_text(target.read_text().replace("yes", "no", 1))
    assert run_tool(tool, "--check", target).exit_code == 1


def test_the_page_in_docs_is_that_of_the_plugins_that_there_are(tool: ModuleType) -> None:
    result = run_tool(tool, "--check")
    assert result.exit_code == 0, result.output
