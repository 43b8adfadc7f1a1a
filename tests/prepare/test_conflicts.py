"""What excludes what, as minimal sets: against every subset of plugins made up at random."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api import Claim, PluginResolutionError, Support
from ascend_run.prepare.conflicts import find_conflicts, minimal_failing_sets
from ascend_run.prepare.prepare import prepare
from ascend_run.registry.kinds import Plugin
from ascend_run.registry.resolution import resolve
from ascend_run.tools.plan.incompatibilities import trace
from tests.support.demo import DEMO, NEEDS_ITS_FEATURES
from tests.support.fake_distributions import plugin_source
from tests.support.fake_plugins import named, platform, plugin
from tests.support.installed import Install, offer

NAMES = ("a", "b", "c", "d", "e")
CLAIMS = (Claim.EXPERTS, Claim.ROUTER)


@st.composite
def universes(draw: st.DrawFn) -> dict[str, Plugin]:
    """Five features that claim, require, exclude and follow one another, and a platform."""
    others = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
    made = []
    for name in NAMES:
        runs_here = draw(st.integers(0, 7)) > 0
        made.append(
            plugin(
                name,
                claims=tuple(draw(st.lists(st.sampled_from(CLAIMS), max_size=1))),
                requires=tuple(n for n in draw(others) if n != name),
                conflicts={n: "they do not agree" for n in draw(others)[:1] if n != name},
                after=tuple(n for n in draw(others)[:1] if n != name),
                platforms={"cpu" if runs_here else "npu": Support.REAL},
            )
        )
    return named(*made, platform("cpu"))


def subsets(names: Iterable[str]) -> Iterable[frozenset[str]]:
    listed = sorted(names)
    every = (combinations(listed, size) for size in range(len(listed) + 1))
    return map(frozenset, chain.from_iterable(every))


def runs(names: Iterable[str], universe: Mapping[str, Plugin]) -> bool:
    try:
        resolve(sorted(names), universe)
    except PluginResolutionError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(universes(), st.sets(st.sampled_from([*NAMES, "cpu"]), min_size=1))
def test_every_reported_set_is_minimal_and_every_minimal_set_is_reported(
    universe: dict[str, Plugin], asked: set[str]
) -> None:
    everything = list(subsets(universe))
    runnable = [names for names in everything if runs(names, universe)]

    def can_be_completed(names: frozenset[str]) -> bool:
        """By brute force over all that there is to add."""
        return any(names <= larger for larger in runnable)

    failing = [names for names in subsets(asked) if not can_be_completed(names)]
    minimal = [names for names in failing if not any(other < names for other in failing)]

    found = find_conflicts(asked, universe)

    assert {frozenset(c.plugins) for c in found.found} == set(minimal)
    best = max(
        (len(n - {"cpu"}) for n in subsets(asked) if asked & {"cpu"} <= n and can_be_completed(n)),
        default=None,
    )
    if not minimal:
        assert found.can_run == ()
    for offered in found.can_run:
        assert runs({*offered, *(asked & {"cpu"})}, universe)
        assert len({*offered} & asked) == best


@settings(max_examples=150, deadline=None)
@given(st.lists(st.frozensets(st.integers(0, 6), min_size=1, max_size=4), max_size=6))
def test_the_search_finds_every_minimal_set_of_any_kind(bad: list[frozenset[int]]) -> None:
    names = frozenset("abcdefg")
    wrong = [frozenset("abcdefg"[i] for i in members) for members in bad]
    minimal = {w for w in wrong if not any(other < w for other in wrong)}

    found, hitting = minimal_failing_sets(names, lambda chosen: any(w <= chosen for w in wrong))

    assert set(found) == minimal
    best = min(len(h) for h in subsets(names) if all(h & w for w in minimal))
    assert min(map(len, hitting)) == best
    assert all(h & w for h in hitting for w in minimal)


def test_a_requirement_can_close_the_circle() -> None:
    universe = named(
        plugin("user", requires=("base",)),
        plugin("base", conflicts={"rival": "both write the same buffer; enable one"}),
        plugin("rival"),
    )
    (conflict,) = find_conflicts(["user", "rival"], universe).found

    assert conflict.plugins == ("rival", "user")
    assert conflict.why == (
        "'rival' and 'user' cannot run together: 'user' requires 'base', and 'base' cannot run "
        "with 'rival': both write the same buffer"
    )
    assert conflict.way_out == "leave out rival or user"


def test_rivals_may_be_asked_for_by_an_alias() -> None:
    rivals = [plugin(name, aliases=(f"{name}-too",), claims=(Claim.EXPERTS,)) for name in "ab"]
    classes = {"a-too": rivals[0], "b": rivals[1]}
    (conflict,) = find_conflicts(["a-too", "b"], classes).found

    assert conflict.plugins == ("a", "b")


def test_many_rivals_are_reported_in_pairs() -> None:
    universe = named(*(plugin(name, claims=(Claim.EXPERTS,)) for name in "abcdefghijkl"))
    found = find_conflicts("abcdefghijkl", universe)

    assert len(found.found) == 66


def test_what_is_required_and_not_installed_is_no_conflict() -> None:
    assert find_conflicts(["user"], named(plugin("user", requires=("lost",)))).found == ()


def offer_circle(install: Install) -> None:
    """A second owner of what ``relay`` of the file owns."""
    offer(install, "circle", plugin_source("circle", "claims=(Claim.CONTEXT_PARALLEL,)"))


def test_a_run_is_refused_with_the_sets_and_what_can_run(
    install: Install, file: Path, tmp_path: Path
) -> None:
    offer(install, "album")
    offer_circle(install)
    file.write_text('enable = ["album", "relay", "circle"]')

    with pytest.raises(PluginResolutionError) as refused:
        prepare(file)

    assert refused.value.problems == (
        (
            "'circle' and 'relay' both claim 'context-parallel', which only one "
            "plugin can own; enable one of them"
        ),
        "the most that can run: --enable album,relay or --enable album,circle",
    )
    (conflict,) = refused.value.conflicts
    assert conflict["plugins"] == ("circle", "relay")


def test_a_platform_is_part_of_what_excludes(install: Install, file: Path) -> None:
    runs_here = "platforms={'cpu': Support.REAL}"
    offer(install, "homely", plugin_source("homely", runs_here))
    runs_there = "platforms={'cpu': Support.REAL, 'npu': Support.UNVERIFIED}"
    offer(install, "travelled", plugin_source("travelled", runs_there))
    with pytest.raises(PluginResolutionError) as refused:
        prepare(None, enable=["homely", "travelled"], platform="npu")

    (conflict,) = refused.value.conflicts
    assert conflict["plugins"] == ("homely", "npu")
    assert refused.value.can_run == (("travelled",),)
    assert any("choose one with --platform" in problem for problem in refused.value.problems)


def test_other_problems_of_the_set_are_reported_too(install: Install, file: Path) -> None:
    offer_circle(install)
    with pytest.raises(PluginResolutionError) as refused:
        prepare(None, enable=["relais", "relay", "circle"])

    problems: Any = refused.value.problems
    assert problems[0].startswith("unknown plugin 'relais'")
    assert "both claim" in problems[1]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["plan", "--config", str(DEMO), *words, "--json"]) == 2
    return json.loads(capsys.readouterr().out)


@NEEDS_ITS_FEATURES
def test_a_feature_that_does_not_go_with_the_settings_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recompute = ("model.recompute_granularity=full", "model.recompute_method=uniform")
    told = refusal(capsys, *recompute, "model.recompute_num_layers=1")

    (conflict,) = told["conflicts"]
    assert conflict["plugins"] == ["swap-attention"]
    assert conflict["why"] == told["problems"][0]
    assert conflict["way_out"] == "change the setting, or leave out swap-attention"
    assert told["can_run"] == [["gmm", "ulysses"]]


@NEEDS_ITS_FEATURES
def test_leaving_out_what_another_setting_needs_is_not_offered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = refusal(capsys, "parallel.context_parallel_size=16", "--world", "16")

    assert ["ulysses"] in [conflict["plugins"] for conflict in told["conflicts"]]
    assert told["can_run"] == [], "without ulysses nobody exchanges the sequence"


@NEEDS_ITS_FEATURES
def test_what_no_feature_causes_is_in_no_set(capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, "--world", "3")

    assert told["problems"]
    assert told["conflicts"] == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.frozensets(st.sampled_from("abcde"), max_size=3), max_size=4))
def test_each_traced_set_has_its_problem_and_no_part_of_it_has(bad: list[frozenset[str]]) -> None:
    def problems(features: frozenset[str]) -> frozenset[str]:
        return frozenset(f"problem {i}" for i, wrong in enumerate(bad) if wrong <= features)

    enabled = frozenset("abcde")
    found = trace(sorted(problems(enabled)), enabled, problems)

    assert {c.why for c in found.found} == {f"problem {i}" for i, wrong in enumerate(bad) if wrong}
    for conflict in found.found:
        assert conflict.why in problems(frozenset(conflict.plugins))
        for part in subsets(conflict.plugins):
            if part != frozenset(conflict.plugins):
                assert conflict.why not in problems(part)
    for offered in found.can_run:
        assert not problems(frozenset(offered))
