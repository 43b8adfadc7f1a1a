"""What several plugins do with the activations of one layer is composed, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_run.core.config.activation_policy import activation_policies
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import ActivationTreatment, HookError, Keeping, RunConfig
from ascend_run.prepare.checks.activation_policy import policy_problems
from tests.support.fake_plugins import plugin
from tests.support.tiny_configs import model_fields, parallel_fields

HOOK = "ascend_activation_policy"
RECOMPUTE, DISCARD, OFFLOAD = map(ActivationTreatment, Keeping)


def treating(name: str, policy: Any) -> Any:
    """A plugin with the same policy for all layers, or a function of the hook's arguments."""
    answer = policy if callable(policy) else lambda self: policy
    return plugin(name, {HOOK: answer})()


def config(layers: int = 4, parallel: Mapping[str, Any] | None = None, **model: Any) -> RunConfig:
    return RunConfig(
        model=model_fields({"num_layers": layers, **model}), parallel=parallel_fields(parallel)
    )


def kept(run: RunConfig, *plugins: Any) -> dict[int, dict[str, str]]:
    """Layer -> part -> owner."""
    return {
        layer: {part: owner for part, (owner, _) in policy.treated.items()}
        for layer, policy in activation_policies(run, Hooks(plugins)).items()
    }


def problems(run: RunConfig, *plugins: Any) -> list[str]:
    return list(policy_problems(run, Hooks(plugins)))


def test_different_parts_of_a_layer_have_different_owners() -> None:
    swap = treating("swap", {"self_attention": OFFLOAD})
    drop = treating("drop", {"mlp.activation_func": DISCARD})
    both = {"self_attention": "swap", "mlp.activation_func": "drop"}
    assert kept(config(2), swap, drop) == {0: both, 1: both}
    assert problems(config(2), swap, drop) == []


def test_two_plugins_for_one_part_are_named_with_the_part_and_the_layers() -> None:
    one = treating("one", {"mlp": RECOMPUTE})
    other = treating("other", lambda self, place: {"mlp": OFFLOAD} if place else {})
    (problem,) = problems(config(4), one, other)
    assert problem == (
        "'one' and 'other' both treat the activations of mlp, in layer 1 and 2 more; leave out "
        "one, or give them other layers or modules"
    )


def test_what_is_within_a_recomputed_part_needs_no_treatment() -> None:
    first = treating("first", lambda self, place: {"": RECOMPUTE} if place == 0 else {})
    drop = treating("drop", {"mlp.activation_func": DISCARD, "input_layernorm": DISCARD})
    mlp = treating("mlp", lambda self, place: {"mlp": RECOMPUTE} if place == 1 else {})
    assert kept(config(3), drop, first, mlp) == {
        0: {"": "first"},
        1: {"input_layernorm": "drop", "mlp": "mlp"},
        2: {"mlp.activation_func": "drop", "input_layernorm": "drop"},
    }
    policies = activation_policies(config(3), Hooks([drop, first, mlp]))
    assert [sorted(policy.overruled) for policy in policies.values()] == [
        ["input_layernorm", "mlp.activation_func"],
        ["mlp.activation_func"],
        [],
    ]


def test_only_recomputation_rules_what_is_within() -> None:
    outer = treating("outer", {"mlp": OFFLOAD})
    inner = treating("inner", {"mlp.activation_func": DISCARD})
    assert kept(config(1), outer, inner)[0] == {"mlp": "outer", "mlp.activation_func": "inner"}


def test_parts_beside_and_around_a_recomputed_one_are_treated() -> None:
    one = treating("one", {"mlp.shared_experts": RECOMPUTE})
    around = {"mlp": OFFLOAD, "mlp.activation_func": OFFLOAD, "pre_mlp_layernorm": DISCARD}
    assert set(kept(config(1), one, treating("other", around))[0]) == {
        *around,
        "mlp.shared_experts",
    }


def test_experts_alone_are_no_part() -> None:
    """They take more than the hidden state: counts of tokens, and probabilities."""
    with pytest.raises(HookError, match=r"'one' treats 'mlp\.experts'"):
        activation_policies(config(1), Hooks([treating("one", {"mlp.experts": RECOMPUTE})]))


def test_a_plugin_of_which_nothing_is_left_is_refused() -> None:
    drop = treating("drop", {"mlp.activation_func": DISCARD})
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    (problem,) = problems(config(2, **full), drop)
    assert problem == (
        "drop: all that it treats is within what model.recompute_granularity recomputes already; "
        "leave out one of them"
    )
    block = {**full, "recompute_method": "block", "recompute_num_layers": 1}
    assert problems(config(2, **block), drop) == []


def test_a_refusal_names_the_plugins_whose_parts_contain_the_refused_ones() -> None:
    norm = treating("norm", {"input_layernorm": RECOMPUTE})
    mlp = treating("mlp", lambda self, place: {"mlp": RECOMPUTE} if place else {})
    first = treating("first", lambda self, place: {} if place else {"": RECOMPUTE})
    drop = treating("drop", {"mlp.activation_func": DISCARD})
    (problem,) = problems(config(3), norm, mlp, first, drop)
    assert problem.startswith("drop: all that it treats is within what first and mlp recomputes")


def test_the_outermost_of_two_recomputed_parts_is_named() -> None:
    mlp, layer = treating("mlp", {"mlp": RECOMPUTE}), treating("layer", {"": RECOMPUTE})
    drop = treating("drop", {"mlp.activation_func": DISCARD})
    told = problems(config(1), mlp, layer, drop)
    assert [line.split(" recomputes")[0] for line in told] == [
        "drop: all that it treats is within what layer",
        "mlp: all that it treats is within what layer",
    ]


def test_a_plugin_that_treats_no_part_of_any_layer_is_refused() -> None:
    experts = treating("shared", lambda self, has_experts: {"mlp": OFFLOAD} if has_experts else {})
    (problem,) = problems(config(2), experts)
    assert problem == (
        "shared: with its options it treats the activations of no layer of this model; change "
        "them, or leave shared out"
    )
    assert problems(config(2, num_moe_experts=2, moe_layer_freq=(0, 1)), experts) == []
    assert problems(config(2), treating("elsewhere", None)) == []


def test_an_option_of_megatron_without_effect_is_not_named_as_a_plugin() -> None:
    run = config(1, recompute_granularity="selective", recompute_modules=("moe",))
    assert problems(run) == []


@pytest.mark.parametrize(
    ("options", "recomputed"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform",
          "recompute_num_layers": 1}, [{""}] * 4),
        ({"recompute_granularity": "full", "recompute_method": "block",
          "recompute_num_layers": 1}, [{""}, set(), {""}, set()]),
        ({"recompute_granularity": "selective"}, [{"self_attention.core_attention"}] * 4),
        ({"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, [{"mlp"}] * 4),
        ({"recompute_granularity": "selective", "recompute_modules": ("moe",)}, [set()] * 4),
        ({"recompute_granularity": "selective", "recompute_modules": ("moe", "shared_experts"),
          "num_moe_experts": 2, "moe_layer_freq": 2},
         [{"mlp"}, set(), {"mlp"}, set()]),
        ({"recompute_granularity": "selective", "recompute_modules": ("shared_experts",),
          "num_moe_experts": 2}, [{"mlp.shared_experts"}] * 4),
    ],
    ids=["uniform", "block of each chunk", "core_attn", "mlp", "no moe", "moe", "shared"],
)  # fmt: skip
def test_what_megatron_recomputes_counts(
    options: dict[str, Any], recomputed: list[set[str]]
) -> None:
    halves = {"pipeline_model_parallel_size": 2}
    found = kept(config(4, halves, **options))
    assert [set(found[layer]) for layer in range(4)] == recomputed


def test_what_megatron_recomputes_is_not_treated_again() -> None:
    again = treating("again", {"mlp": RECOMPUTE})
    selective = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}
    (problem,) = problems(config(1, **selective), again)
    assert problem.startswith("'model.recompute_modules' and 'again' both treat the activations of")


def test_a_part_that_no_layer_has_is_refused() -> None:
    wrong = treating("wrong", {"mlp.activation": DISCARD})
    with pytest.raises(HookError, match=r"'wrong' treats 'mlp.activation'; expected one of \(''"):
        activation_policies(config(1), Hooks([wrong]))


def test_places_are_counted_in_chunks_without_empty_slots() -> None:
    asked = []

    def answer(
        self: Any, layer_index: int, has_experts: bool, place: int, chunk: int, num_chunks: int
    ) -> dict[str, ActivationTreatment]:
        asked.append((layer_index, has_experts, place, chunk, num_chunks))
        return {}

    empty = plugin("empty", {"ascend_empty_layers": lambda self: (1,)})()
    chunks = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    experts = {"num_moe_experts": 2, "moe_layer_freq": (0, 0, 0, 0, 1, 0, 0, 1)}
    run = config(8, chunks, mtp_num_layers=2, **experts)
    activation_policies(run, Hooks([treating("asking", answer), empty]))
    assert asked == [
        (0, False, 0, 0, 2),
        (4, True, 0, 1, 2),
        (5, False, 1, 1, 2),
        (2, False, 0, 0, 2),
        (3, False, 1, 0, 2),
        (6, False, 0, 1, 2),
        (7, True, 1, 1, 2),
        (8, True, 2, 1, 2),
        (9, True, 3, 1, 2),
    ]
