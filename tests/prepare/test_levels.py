"""``--level N``: which features it adds, which it leaves out and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ascend_run.plugin_api import AscendRunError, Manifest, PluginResolutionError, hookimpl
from ascend_run.prepare import levels
from ascend_run.prepare.plan.records import Bundle
from ascend_run.prepare.prepare import PreparedRun, prepare
from ascend_run.registry.discovery import Catalogue, discover
from ascend_run.tools.plan import command as plan
from tests.support.installed import Install, offer

ONE_RANK = ["run.nproc=1", "parallel.context_parallel_size=1"]
MOE = ["model.num_moe_experts=4", "model.family=mixtral"]


def prepared(file: Path, *overrides: str, **kwargs: Any) -> PreparedRun:
    return prepare(file, [*ONE_RANK, *overrides], **{"enable": [], **kwargs})


def bundle(file: Path, *overrides: str, **kwargs: Any) -> Bundle:
    found = prepared(file, *overrides, **kwargs).plan.level
    assert found is not None
    return found


@pytest.mark.needs_plugins("gmm", "swap-attention")
def test_a_level_names_what_it_adds_and_nothing_below_it_is_forgotten(file: Path) -> None:
    members = [{*bundle(file, *MOE, level=level).members} for level in (0, 1, 2)]
    assert members[0] <= members[1] <= members[2]
    assert {"gmm", "swap-attention"} <= members[2]
    assert {*prepared(file, *MOE, level=2).config.enable} == members[2]
    catalogue = discover()
    for level, names in enumerate(members):
        assert all(catalogue.load([n])[n].manifest.level <= level for n in names)


def test_without_a_level_nothing_is_added(file: Path) -> None:
    run = prepared(file)
    assert run.config.enable == ()
    assert run.plan.level is None


@pytest.mark.needs_plugins("gmm", "ulysses")
def test_what_changes_nothing_in_this_run_is_left_out_and_says_so(file: Path) -> None:
    left_out = bundle(file, level=2).left_out
    assert left_out["gmm"] == "it changes nothing in this run, as model.num_moe_experts <= 0"
    assert "context_parallel_size <= 1" in left_out["ulysses"]


@pytest.mark.needs_plugins("noop-layers")
def test_what_changes_the_model_is_left_out(file: Path) -> None:
    assert "changes the model's result" in bundle(file, level=2).left_out["noop-layers"]


@pytest.mark.needs_plugins("swap-attention")
def test_what_the_config_refuses_is_left_out_with_the_refusal(file: Path) -> None:
    recompute = ["model.recompute_granularity=full", "model.recompute_method=uniform"]
    left_out = bundle(file, *recompute, "model.recompute_num_layers=1", level=2).left_out
    already = "within what model.recompute_granularity recomputes already"
    assert already in left_out["swap-attention"]


@pytest.mark.needs_plugins("ulysses", "ring-attention")
def test_of_two_that_exclude_one_another_neither_is_chosen(file: Path) -> None:
    """The run still needs an owner of the exchange, which then is the refusal."""
    with pytest.raises(AscendRunError, match="context_parallel_size"):
        prepare(file, enable=[], level=2)
    found = prepare(file, enable=["ulysses"], level=2).plan.level
    assert found is not None
    assert "both claim 'context-parallel'" in found.left_out["ring-attention"]
    assert "ulysses" not in {*found.members, *found.left_out}


@pytest.mark.needs_plugins("gmm", "moe-alltoall", "moe-bmm-fused")
def test_what_replaces_features_of_a_level_is_not_in_it(file: Path) -> None:
    padded = ["model.moe_expert_capacity_factor=1", "model.moe_pad_expert_input_to_capacity=true"]
    ranks = ["run.nproc=2", "parallel.expert_model_parallel_size=2"]
    found = bundle(file, *MOE, *padded, *ranks, level=2)
    assert {"gmm", "moe-alltoall"} <= {*found.members}
    assert "moe-bmm-fused" not in {*found.members, *found.left_out}


@pytest.mark.needs_plugins("gmm", "swap-attention")
def test_names_stand_beside_a_level_and_disabled_ones_do_not_come(file: Path) -> None:
    run = prepared(file, *MOE, level=2, enable=["gmm"], disable=["swap-attention"])
    assert "gmm" in run.config.enable
    assert "swap-attention" not in run.config.enable
    assert run.plan.level is not None
    assert run.plan.level.left_out["swap-attention"] == "disabled by name"
    assert "gmm" not in run.plan.level.members


@pytest.mark.needs_plugins("gloo-offload")
def test_an_alias_disables_too(file: Path) -> None:
    found = bundle(file, level=2, disable=["gloo-free-save"])
    assert found.left_out["gloo-offload"] == "disabled by name"


def test_disabling_counts_over_the_files_features(file: Path) -> None:
    assert prepare(file, ONE_RANK).config.enable == ("relay",)
    run = prepare(file, ONE_RANK, disable=["relay"])
    assert run.config.enable == ()
    assert run.resolved.origins["enable"] == "command line, --disable"


def test_enabling_and_disabling_one_plugin_is_one_of_all_problems(
    file: Path,
) -> None:
    with pytest.raises(PluginResolutionError) as refused:
        prepared(file, enable=["relay"], disable=["relay", "relais"], level=1)
    text = str(refused.value)
    assert "'relay' is both enabled and disabled" in text
    assert "unknown plugin 'relais'" in text


def test_a_third_partys_plugin_is_not_even_imported(install: Install, file: Path) -> None:
    offer(install, "outsider", "raise AssertionError('a level is no word for it')")
    found = bundle(file, level=2)
    assert "outsider" not in {*found.members, *found.left_out}


@pytest.mark.needs_plugins("gmm", "noop-layers", "swap-attention")
def test_the_plan_shows_members_and_reasons(file: Path) -> None:
    words = ["--config", str(file), *ONE_RANK, *MOE, "--enable", "gmm", "--level", "2"]
    shown = CliRunner().invoke(plan.command, words, catch_exceptions=False).output
    assert "level 2 adds " in shown
    assert "left out" in shown
    assert "changes the model's result" in shown
    data = json.loads(CliRunner().invoke(plan.command, [*words, "--json"]).output)
    why = {p["name"]: p["why"] for p in data["plugins"]}
    assert why["swap-attention"].startswith("a member of --level 2")
    assert why["gmm"].startswith("enabled by name")


def fake(name: str, requires: Sequence[str] = ()) -> type:
    class Plugin:
        manifest = Manifest(name=name, summary="a test's", requires=tuple(requires))

        @hookimpl
        def ascend_before_run(self) -> None:
            """So that it has a hook."""

    return Plugin


def test_a_member_that_needs_another_member_comes_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    classes = {"base": fake("base"), "above": fake("above", ["base"]), "lost": fake("lost", ["no"])}
    monkeypatch.setattr(levels, "_ours", lambda catalogue: (classes, {}))

    def attempt(features: Sequence[str]) -> levels.Trial:
        problems = [
            f"'{name}' requires '{other}'"
            for name in features
            for other in classes[name].manifest.requires
            if other not in features
        ]
        return levels.Trial(problems=frozenset(problems))

    found = levels.choose_members(2, [], [], Catalogue([]), attempt)
    assert found.members == ("above", "base")
    assert found.left_out == {"lost": "'lost' requires 'no'"}
