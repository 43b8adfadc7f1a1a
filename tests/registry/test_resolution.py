from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.plugin_api import (
    Claim,
    Condition,
    PluginLoadError,
    PluginResolutionError,
    Support,
)
from ascend_run.registry.kinds import Kind
from ascend_run.registry.resolution import check_conditions, resolve
from tests.support.fake_plugins import named, platform, plugin


def refusal_of(*plugins: type, names: list[str] | None = None) -> PluginResolutionError:
    classes = named(*plugins)
    with pytest.raises(PluginResolutionError) as refused:
        resolve(names or [*classes], classes)
    return refused.value


def test_the_order_of_naming_does_not_matter() -> None:
    classes = named(
        platform("cpu"),
        plugin("llama", claims=(Claim.MODEL_FAMILY,)),
        plugin("pretrain", claims=(Claim.TASK,)),
        plugin("b", after=("z",)),
        plugin("a"),
        plugin("z"),
    )

    orders = {resolve(names, classes).names for names in itertools.permutations(classes)}

    assert orders == {("llama", "pretrain", "a", "z", "b", "cpu")}


@given(st.data())
def test_every_declared_order_is_kept_whatever_the_set(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1))
    after = {n: tuple(data.draw(st.sets(st.sampled_from(names[:i] or names)))) if i else ()
             for i, n in enumerate(names)}  # fmt: skip
    classes = named(*(plugin(name, after=before) for name, before in after.items()))

    order = resolve(names, classes).names

    assert sorted(order) == sorted(names)
    for name, before in after.items():
        assert all(order.index(other) < order.index(name) for other in before)
    assert order == resolve(data.draw(st.permutations(names)), classes).names


def test_what_a_plugin_requires_is_further_in() -> None:
    classes = named(plugin("a", requires=("z",)), plugin("z"))

    assert resolve(["a", "z"], classes).names == ("z", "a")


@pytest.mark.parametrize("owner", ["a-ring", "z-ring"])
def test_an_order_by_seam_holds_for_any_owner(owner: str) -> None:
    """The names would sort otherwise; without an owner they decide."""
    ring = plugin(owner, claims=(Claim.CONTEXT_PARALLEL,))
    inner = plugin("z-inner", inside=(Claim.CONTEXT_PARALLEL,))
    outer = plugin("a-outer", outside=(Claim.CONTEXT_PARALLEL,))
    classes = named(ring, inner, outer)

    orders = {resolve(names, classes).names for names in itertools.permutations(classes)}

    assert orders == {("z-inner", owner, "a-outer")}
    assert resolve(["z-inner", "a-outer"], classes).names == ("a-outer", "z-inner")


def test_aliases_stand_for_the_canonical_name_and_repetition_is_harmless() -> None:
    ring = plugin("ring", aliases=("circle",))
    user = plugin("user", requires=("circle",), after=("circle",))
    classes = named(ring, user)

    assert resolve(["circle", "ring", "user", "circle"], classes).names == ("ring", "user")


def test_two_claimants_of_one_seam_are_refused_naming_both() -> None:
    error = refusal_of(
        plugin("ulysses", claims=(Claim.CONTEXT_PARALLEL,)),
        plugin("ring", claims=(Claim.CONTEXT_PARALLEL,)),
    )

    (problem,) = error.problems
    assert problem == (
        "'ring' and 'ulysses' both claim 'context-parallel', which only one plugin can own; "
        "enable one of them"
    )


def test_two_platforms_are_refused_with_the_option_that_chooses() -> None:
    error = refusal_of(platform("cpu"), platform("npu"))

    assert "choose one with --platform" in error.problems[0]


def test_three_claimants_are_one_problem() -> None:
    error = refusal_of(*(plugin(name, claims=(Claim.EXPERTS,)) for name in "abc"))

    assert len(error.problems) == 1
    assert "'a', 'b' and 'c' all claim" in error.problems[0]


def test_a_shared_claim_is_one_problem_though_the_hook_is_shared_too() -> None:
    hooks = {"ascend_experts": lambda self: None}
    rivals = [plugin(name, hooks) for name in "ab"]

    assert len(refusal_of(*rivals).problems) == 1


def test_the_platform_is_no_rival_of_a_provider() -> None:
    hooks = {"ascend_attention_kernel": lambda self: None}
    kernel = plugin("kernel", hooks)

    assert resolve(["cpu", "kernel"], named(platform("cpu", hooks), kernel)).names == (
        "kernel",
        "cpu",
    )


def test_wrappers_may_be_many() -> None:
    hooks = {"ascend_layer": lambda self: None}

    assert resolve(["a", "b"], named(plugin("a", hooks), plugin("b", hooks))).names == ("a", "b")


def test_a_missing_requirement_is_refused_with_the_fix() -> None:
    error = refusal_of(plugin("ring", requires=("gmm",)))

    assert error.problems == ("'ring' requires 'gmm'; add it: --enable ring,gmm",)


def test_the_fix_adds_everything_that_is_missing_and_no_platform() -> None:
    error = refusal_of(
        platform("cpu"), plugin("a", requires=("c",)), plugin("b", requires=("d", "a"))
    )

    assert error.problems == (
        "'a' requires 'c'; add it: --enable a,b,c,d",
        "'b' requires 'd'; add it: --enable a,b,c,d",
    )


def test_a_conflict_is_refused_once_with_its_reason() -> None:
    error = refusal_of(
        plugin("a", conflicts={"b": "both own the tensors that a layer saves"}),
        plugin("b", aliases=("bee",), conflicts={"a": "the same"}),
        names=["a", "bee"],
    )

    assert error.problems == ("'a' cannot run with 'b': both own the tensors that a layer saves",)


def test_a_conflict_with_an_alias_counts() -> None:
    error = refusal_of(
        plugin("a", conflicts={"bee": "why"}), plugin("b", aliases=("bee",)), names=["a", "b"]
    )

    assert error.problems == ("'a' cannot run with 'b': why",)


def test_a_conflict_with_an_absent_plugin_is_none() -> None:
    assert resolve(["a"], named(plugin("a", conflicts={"b": "why"}))).names == ("a",)


def test_a_cycle_is_printed_as_a_cycle() -> None:
    error = refusal_of(
        plugin("a", after=("c",)), plugin("b", after=("a",)), plugin("c", after=("b",))
    )

    (problem,) = error.problems
    around = problem.split(": ")[1].split(" (")[0].split(" -> ")
    assert around[0] == around[-1]
    assert " -> ".join(around) in "a -> b -> c -> a -> b -> c"


def test_a_cycle_through_a_seam_says_who_declares_what() -> None:
    error = refusal_of(
        plugin("ring", claims=(Claim.CONTEXT_PARALLEL,), requires=("swap",)),
        plugin("swap", outside=(Claim.CONTEXT_PARALLEL,)),
    )

    (problem,) = error.problems
    assert "swap is declared to be outside of context-parallel, which ring owns" in problem
    assert "ring requires swap" in problem
    assert problem.split(": ")[1].split(" (")[0] in ("ring -> swap -> ring", "swap -> ring -> swap")


def test_two_cycles_are_two_problems() -> None:
    error = refusal_of(
        plugin("a", after=("b",)),
        plugin("b", after=("a",)),
        plugin("c", requires=("d",)),
        plugin("d", after=("c",)),
    )

    assert len(error.problems) == 2


def test_a_platform_that_a_plugin_does_not_name_is_refused() -> None:
    error = refusal_of(
        platform("npu"),
        plugin("swap", platforms={"cpu": Support.REAL, "npu": Support.REFUSED}),
    )

    (problem,) = error.problems
    assert problem == (
        "'swap' does not run on platform 'npu'; it runs on: cpu; "
        "choose one with --platform or leave it out"
    )


@pytest.mark.parametrize("how", [Support.REAL, Support.EMULATED, Support.UNVERIFIED])
def test_any_other_support_lets_a_plugin_run(how: Support) -> None:
    classes = named(platform("npu"), plugin("swap", platforms={"npu": how}))

    assert resolve([*classes], classes).names == ("swap", "npu")


def test_a_platform_that_behaves_as_another_runs_what_runs_on_that_one() -> None:
    clone = plugin("clone", claims=(Claim.PLATFORM,), behaves_as="cuda", platforms={})
    runs = plugin("runs", platforms={"cuda": Support.REAL})
    refusing = plugin("no", platforms={"cuda": Support.REAL, "clone": Support.REFUSED})
    elsewhere = plugin("elsewhere", platforms={"cpu": Support.REAL})

    assert resolve(["clone", "runs"], named(clone, runs)).names == ("runs", "clone")
    problems = refusal_of(clone, refusing, elsewhere).problems
    assert [problem.partition(";")[0] for problem in problems] == [
        "'elsewhere' does not run on platform 'clone'",
        "'no' does not run on platform 'clone'",
    ]


def test_all_problems_are_in_one_refusal() -> None:
    plugins = [
        platform("npu"),
        plugin("a", claims=(Claim.EXPERTS,), after=("b",)),
        plugin("b", claims=(Claim.EXPERTS,), after=("a",), requires=("missing",)),
        plugin("c", conflicts={"a": "why"}),
    ]
    classes = named(*plugins)
    failures = {"ulises": PluginResolutionError("unknown plugin 'ulises'")}

    with pytest.raises(PluginResolutionError) as refused:
        resolve([*classes, "ulises"], classes, failures)

    words = (
        "unknown plugin",
        "claim",
        "requires",
        "cannot run with",
        "declared order has a cycle",
        "platform",
    )
    for word in words:
        assert any(word in problem for problem in refused.value.problems), word


def test_a_failed_plugin_is_not_missing_as_well() -> None:
    failures = {"gmm": PluginLoadError("'gmm' failed to import")}

    with pytest.raises(PluginLoadError) as refused:
        resolve(["ring", "gmm"], named(plugin("ring", requires=("gmm",))), failures)

    assert refused.value.problems == ("'gmm' failed to import",)


def test_owners_name_the_plugin_of_each_seam() -> None:
    classes = named(platform("cpu"), plugin("gmm", claims=(Claim.EXPERTS,)))

    assert resolve([*classes], classes).owners == {Claim.EXPERTS: "gmm", Claim.PLATFORM: "cpu"}
    assert resolve([*classes], classes).of_kind(Kind.FEATURE) == ("gmm",)


def config(**parallel: Any) -> Any:
    return SimpleNamespace(parallel=SimpleNamespace(**parallel))


def test_conditions_on_the_run_name_value_and_fix() -> None:
    condition = Condition("parallel.cp", ">", 1, why="there is nothing to split", fix="set it to 2")
    resolution = resolve(["ring"], named(plugin("ring", requires=(condition,))))

    assert check_conditions(resolution, config(cp=1)) == [
        "'ring' requires parallel.cp > 1, but it is 1; there is nothing to split; set it to 2"
    ]
    assert check_conditions(resolution, config(cp=2)) == []


def test_a_condition_on_no_key_of_the_config_is_a_problem() -> None:
    resolution = resolve(
        ["ring"], named(plugin("ring", requires=(Condition("parallel.x", ">", 1),)))
    )

    assert "not a config key" in check_conditions(resolution, config(cp=1))[0]
