"""The hooks are the only path to a plugin: without its folder and its line, all else works.

A copy of the package lacks some features, another one others: of any two features, some copy has
the first and lacks the second, so that none can lean on another unseen; model families likewise.
One copy lacks all features.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from configparser import ConfigParser
from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.plugin_api import AscendRunError
from ascend_run.prepare.prepare import prepare
from ascend_run.registry.discovery import discover
from ascend_run.registry.kinds import Kind
from ascend_run.registry.resolution import resolve
from tests.support.tokens import write_tokens

ROOT = Path(__file__).parent.parent.parent
SECONDS = 110
HEAVY = ("torch", "megatron.core", "megatron.core.datasets.gpt_dataset", "transformers")
"""Imported once for all copies; none of them knows us."""
VOCABULARY = 64
ALL: Final = "all features"
SHOWN: Final = ("copy 0", ALL)
"""Copies of the suite: importing and planning in one takes two seconds."""

CATALOGUE = discover()
OURS = {name: found for name, found in CATALOGUE.items() if found.first_party}
FEATURES = [name for name, found in OURS.items() if found.kind is Kind.FEATURE]
FAMILIES = [name for name, found in OURS.items() if found.kind is Kind.MODEL]
PLAIN = (
    *("llama", "gpt2", "qwen2", "mistral", "granite", "internlm", "phi3", "glm"),
    *("aquila", "baichuan", "baichuan2", "bloom", "internlm2", "internlm3"),
)
"""Families whose tiny models need no options."""
CLASSES = CATALOGUE.load(OURS)
PLUGINS = {name: plugin.manifest for name, plugin in CLASSES.items()}


def removals() -> dict[str, tuple[str, ...]]:
    """Label of a copy -> the names, aliases included, of what it lacks.

    Each plugin is missing from a set of copies that contains no other plugin's set (Sperner).
    """
    plugins = [name for name in (*FEATURES, *FAMILIES) if name == PLUGINS[name].name]
    copies = next(n for n in itertools.count(2) if math.comb(n, n // 2) >= len(plugins))
    missing: dict[str, list[str]] = {f"copy {number}": [] for number in range(copies)}
    for name, lacking in zip(plugins, itertools.combinations(missing, copies // 2), strict=False):
        for label in lacking:
            missing[label] += [name, *PLUGINS[name].aliases]
    missing[ALL] = FEATURES
    return {label: tuple(names) for label, names in missing.items()}


REMOVED = removals()

Answers = Mapping[str, Any]
of_each_copy: Final = pytest.mark.exhaustive(by=lambda removed: {removed} & {*SHOWN})


def copy_without(folder: Path, names: Sequence[str]) -> None:
    """The package as it would be installed, had these plugins never been written."""
    shutil.copytree(ROOT / "ascend_run", folder / "ascend_run")
    for module in {OURS[name].entry_point.module for name in names}:
        path = folder / module.replace(".", "/")
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.with_suffix(".py").unlink()
    setup = ConfigParser()
    setup.optionxform = str  # type: ignore[assignment,method-assign]
    setup.read(ROOT / "setup.cfg")
    lines = []
    for group, entries in setup["options.entry_points"].items():
        kept = [entry for entry in entries.split("\n") if entry.partition(" = ")[0] not in names]
        lines += [f"[{group}]", *kept]
    metadata = folder / "ascend_run-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ascend-run\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


@functools.cache
def together(removed: tuple[str, ...]) -> tuple[str, ...]:
    """Of the features that are left, as many as may run at once, in their order."""
    chosen: tuple[str, ...] = ()
    family = family_beside(removed)
    for name in FEATURES:
        if name in removed or not runs_by_default(name, family):
            continue
        with contextlib.suppress(AscendRunError):
            resolve((*chosen, name), {one: CLASSES[one] for one in (*chosen, name)})
            chosen = (*chosen, name)
    return chosen


@functools.cache
def runs_by_default(name: str, family: str) -> bool:
    """Whether a feature asks for no option; an alias is not asked at all."""
    if name != PLUGINS[name].name:
        return False
    try:
        prepare(None, tiny_run(family), enable=(name,))
    except AscendRunError:
        return False
    return True


def family_beside(names: Sequence[str]) -> str:
    """One that is left, whose tiny model needs no options."""
    return next(name for name in PLAIN if name not in names)


def tiny_run(family: str) -> list[str]:
    return [
        f"model.family={family}",
        "model.num_layers=2",
        "model.hidden_size=16",
        "model.num_attention_heads=2",
        f"model.vocab_size={VOCABULARY}",
        "data.train=tokens",
        "data.seq_length=16",
        "train.precision=fp32",
        "train.train_iters=2",
        "run.output_dir=run",
    ]


OPTIONS: Final = {"recompute": ("plugins.recompute.num_layers=1",)}  # the others have one, too


def commands(names: Sequence[str]) -> dict[str, list[str]]:
    run, left = tiny_run(family_beside(names)), together((*names,))
    options = [option for name in left for option in OPTIONS.get(name, ())]
    asked = {
        "list": ["plugins", "--json"],
        "plan": ["plan", "--json", *run, *options, *(["--enable", ",".join(left)] if left else [])],
        "plan of them": ["plan", *run, "--enable", ",".join(names)],
    }
    if set(names) >= set(FEATURES):
        asked["train"] = ["train", *run]
    return asked


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Answers]:
    """What every copy answered that a test of this session asks for."""
    folder = tmp_path_factory.mktemp("removal")
    items = [item for item in request.session.items if item.path == request.path]
    calls = [getattr(item, "callspec", None) for item in items]
    asked = {ALL, *(call.params["removed"] for call in calls if call)}
    removed = {label: names for label, names in REMOVED.items() if label in asked}
    trees = []
    for label, names in removed.items():
        tree = folder / label.replace(" ", "-")
        copy_without(tree, names)
        write_tokens(tree, VOCABULARY)
        output = str(tree / "answers.json")
        trees.append({"folder": str(tree), "commands": commands(names), "output": output})
    (folder / "request.json").write_text(json.dumps({"heavy": HEAVY, "trees": trees}))
    driver = ROOT / "tests/support/removal_driver.py"
    # Nothing of this tree may be found, only the copies.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(driver), str(folder / "request.json")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = (json.loads(Path(str(tree["output"])).read_text()) for tree in trees)
    return dict(zip(removed, outputs, strict=True))


def test_of_any_two_some_copy_has_the_one_and_lacks_the_other() -> None:
    names = [name for name in (*FEATURES, *FAMILIES) if name == PLUGINS[name].name]
    for one, other in itertools.permutations(names, 2):
        assert any(other in lacking and one not in lacking for lacking in REMOVED.values())


@of_each_copy
@pytest.mark.parametrize("removed", REMOVED)
def test_everything_else_can_be_imported(results: Mapping[str, Answers], removed: str) -> None:
    assert results[removed]["broken"] == {}
    assert f"/{removed.replace(' ', '-')}/ascend_run/" in results[removed]["package"]


@of_each_copy
@pytest.mark.parametrize("removed", REMOVED)
def test_what_is_left_is_listed_and_nothing_else(
    results: Mapping[str, Answers], removed: str
) -> None:
    result = results[removed]["commands"]["list"]
    assert result["code"] == 0, result["err"]
    listed = {row["name"] for row in json.loads(result["out"])}
    present = {PLUGINS[name].name for name in {*OURS} - {*REMOVED[removed]}}
    assert listed & {*OURS} == present


@of_each_copy
@pytest.mark.parametrize("removed", REMOVED)
def test_a_run_with_all_that_is_left_is_planned(
    results: Mapping[str, Answers], removed: str
) -> None:
    result = results[removed]["commands"]["plan"]
    assert result["code"] == 0, result["err"]
    planned = {plugin["name"] for plugin in json.loads(result["out"])["plugins"]}
    assert {*together(REMOVED[removed])} <= planned
    assert not planned & {*REMOVED[removed]}


@of_each_copy
@pytest.mark.parametrize("removed", REMOVED)
def test_naming_them_is_refused_as_any_unknown_name(
    results: Mapping[str, Answers], removed: str
) -> None:
    result = results[removed]["commands"]["plan of them"]
    assert result["code"] == 2
    for name in REMOVED[removed]:
        assert f"unknown plugin '{name}'" in result["err"]
    assert "Traceback" not in result["err"]


def test_a_run_without_any_feature_trains(results: Mapping[str, Answers]) -> None:
    result = results[ALL]["commands"]["train"]
    assert result["code"] == 0, result["err"]
    assert "loss" in result["out"] + result["err"]
