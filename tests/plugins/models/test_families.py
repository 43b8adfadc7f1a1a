"""Every family of ``cases``: logits, gradients, config.json and weights, against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import torch
from safetensors.torch import save_file

from ascend_run.core.hugging_face.json_files import read_hf_config
from ascend_run.plugin_api import ConfigError, ModelFamily
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from ascend_run.registry.discovery import discover
from ascend_run.testing.pool import GlooPool
from tests.support import family_checks
from tests.support.against_transformers import (
    EXPERT_TENSOR,
    EXPERTS,
    STAGES,
    TENSOR,
    TOLERANCE,
    VIRTUAL_STAGES,
    WIDE_TOLERANCE,
    Reference,
    check_layouts,
    check_loaded_weights,
    check_one_rank,
    check_oracle,
)

from .cases import BASE_500, BY_NAME, CASES, FAMILIES, Family
from .published import BUFFERS, publish

STORED: Final = "model.safetensors"
CATALOGUE = discover()
PLUGINS = {family.name: CATALOGUE.load([family.name])[family.name] for family in FAMILIES}


def record(family: Family) -> ModelFamily:
    """Return our record of a family."""
    found: ModelFamily = PLUGINS[family.name]().ascend_model_family()
    return found


@pytest.fixture(params=CASES.values(), ids=[*CASES])
def case(request: pytest.FixtureRequest) -> tuple[Family, dict[str, Any]]:
    return request.param


def reference_of(
    family: Family,
    changes: Mapping[str, Any],
    folder: Path,
    dtype: torch.dtype = torch.float32,
) -> Reference:
    """Write a random model of a family, and compute its results."""
    model = family.model(dtype, **changes)
    reference = Reference(family.name, model, folder, family.in_our_layout)
    if family.publish:
        publish(folder, family.publish, model.config)
    return reference


@pytest.fixture
def reference(case: tuple[Family, dict[str, Any]], tmp_path: Path) -> Reference:
    return reference_of(*case, tmp_path / "theirs")


@pytest.mark.exhaustive(by=lambda case, dtype: [case[0].name, dtype, *case[1]])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.float64, WIDE_TOLERANCE)], ids=str
)
def test_logits_and_every_gradient_are_those_of_transformers(
    case: tuple[Family, dict[str, Any]],
    gloo_pool: GlooPool,
    tmp_path: Path,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    family, changes = case
    reference = reference_of(family, changes, tmp_path / "theirs", dtype)
    overrides = [f"{key}={value}" for key, value in family.values.items()]
    check_one_rank(reference, gloo_pool, overrides, tolerance)
    if dtype is torch.float64:
        check_oracle(reference, family.values)


NUM_EXPERTS: Final[Mapping[str, str]] = {
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
    "gpt_oss": "num_local_experts",
    "grok1": "num_experts",
    "minicpm_moe": "num_local_experts",
    "mixtral": "num_local_experts",
    "phimoe": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
}
"""Family -> its key of the number of experts."""


def test_every_family_with_experts_has_a_number_of_them() -> None:
    assert {family.name for family in FAMILIES if family.experts} == NUM_EXPERTS.keys()


@pytest.mark.exhaustive(by=lambda variant, count: [variant, count])
@pytest.mark.parametrize(
    ("name", "variant", "count"),
    [
        *((name, "", count) for name in NUM_EXPERTS for count in (3, 128)),
        ("deepseek_v2", "two of four groups", 128),
    ],
)
def test_any_number_of_experts_is_that_of_transformers(
    name: str, variant: str, count: int, gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """Logits and every gradient: of few experts, and of so many that most have no token.

    Args:
        variant: Of the family; default: its first.
    """
    family = BY_NAME[name]
    changes: dict[str, Any] = {
        **family.variants[variant or next(iter(family.variants))],
        NUM_EXPERTS[name]: count,
    }
    if count == 3:
        changes |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    if not name.startswith("deepseek"):
        changes = {key: value for key, value in changes.items() if "group" not in key}
    reference = reference_of(family, changes, tmp_path / "theirs")
    overrides = [f"{key}={value}" for key, value in family.values.items()]
    check_one_rank(reference, gloo_pool, overrides)


@pytest.mark.exhaustive(by=lambda case: [case[0].name, *case[1]])
def test_config_and_weights_return_bit_for_bit(
    case: tuple[Family, dict[str, Any]], reference: Reference, tmp_path: Path
) -> None:
    family, _ = case
    shapes = {name: tuple(weight.shape) for name, weight in reference.weights.items()}
    ours, folder = record(family), reference.folder
    if family.publish is None:
        family_checks.check_config_round_trip(ours, folder)
        family_checks.check_weights_round_trip(ours, folder, shapes, tmp_path)
        return
    given = read_hf_config(folder)
    family_checks.export_again(ours, folder, shapes, tmp_path)
    written, want = read_hf_config(tmp_path / "ours"), family_checks.stored(folder)
    for name in given.keys() - ours.ignored - {"rope_scaling"}:
        assert written[name] == given[name], name
    got = family_checks.stored(tmp_path / "ours")
    assert got.keys() == want.keys() - {*BUFFERS}
    assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def test_plugin_has_its_name_and_claims_the_family(family: Family) -> None:
    plugin = PLUGINS[family.name]
    assert plugin.manifest.name == family.name
    assert {*claims_of(plugin)} == {*family.owns}


def test_every_key_is_named_once(family: Family) -> None:
    family_checks.check_keys_are_named_once(record(family), family.shared)


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.publish is None])
def test_missing_keys_mean_what_they_mean_to_transformers(name: str) -> None:
    from transformers import AutoConfig

    family = BY_NAME[name]
    kind = type(AutoConfig.for_model(family.reference))
    family_checks.check_transformers_defaults(record(family), kind, family.required)


@pytest.mark.exhaustive(by=lambda family: [family.publish is None, bool(record(family).fixed)])
def test_unknown_and_changed_keys_are_refused(family: Family, tmp_path: Path) -> None:
    model = family.model()
    model.save_pretrained(tmp_path)
    if family.publish:
        publish(tmp_path, family.publish, model.config)
    found = read_hf_config(tmp_path)
    assert config_from_hf(record(family), found)
    with pytest.raises(ConfigError, match="unknown key 'vocab_sise'; did you mean"):
        config_from_hf(record(family), {**found, "vocab_sise": 3})
    for name in record(family).fixed:
        with pytest.raises(ConfigError, match=f"{name} is 'other'; only "):
            config_from_hf(record(family), {**found, name: "other"})


def test_a_family_with_learnable_sinks_stores_one_for_each_head(tmp_path: Path) -> None:
    model = BY_NAME["llama"].model()
    reference = Reference("llama", model, tmp_path / "theirs", BY_NAME["llama"].in_our_layout)
    sinks = {f"model.layers.{layer}.self_attn.sinks": torch.randn(4) for layer in range(2)}
    save_file(family_checks.stored(tmp_path / "theirs") | sinks, reference.folder / STORED)
    plain = record(BY_NAME["llama"])
    ours = attrs.evolve(plain, defaults={**plain.defaults, "model.softmax_type": "learnable"})
    shapes = {name: tuple(weight.shape) for name, weight in reference.weights.items()}
    at = "decoder.layers.{}.self_attention.core_attention.softmax_offset"
    shapes |= {at.format(layer): (4,) for layer in range(2)}
    family_checks.export_again(ours, reference.folder, shapes, tmp_path)
    want, got = (family_checks.stored(tmp_path / name) for name in ("theirs", "ours"))
    assert got.keys() == want.keys() >= sinks.keys()
    assert all(torch.equal(got[name], want[name]) for name in got)
    without = family_checks.run_config(plain, read_hf_config(reference.folder))
    with pytest.raises(ConfigError, match="softmax_type is 'vanilla'; LlamaForCausalLM has only"):
        config_to_hf(ours, without)


TENSOR_ALONE: Final = {"parallel.tensor_model_parallel_size": 2}
TWO_RANKS: Final[Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]]] = {
    "tensors and sequences": ((), TENSOR),
    "stages": ((), STAGES),
    "ulysses": (("ulysses",), {"parallel.context_parallel_size": 2}),
}


@pytest.mark.needs_plugins("ulysses")
@pytest.mark.exhaustive(by=lambda family: [family.experts, *family.values])
def test_two_ranks_have_every_gradient_of_the_same_model(
    family: Family, gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """Stages have the first and last layer's neighbours; ulysses has heads and positions.

    The oracle of ``verify`` has the same gradients.
    """
    changes = next(iter(family.variants.values()))
    reference = reference_of(family, changes, tmp_path / "theirs", torch.float64)
    check_oracle(reference, family.values)
    more = {"experts": ((), EXPERTS)} if family.experts else {"tensors": ((), TENSOR_ALONE)}
    check_layouts(reference, gloo_pool, {**TWO_RANKS, **more}, family.values)


@pytest.mark.exhaustive(by=lambda name: [])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_two_ranks_that_share_a_key_value_head_are_transformers(
    name: str, gloo_pool: GlooPool, tmp_path: Path
) -> None:
    one = {"num_key_value_heads": 1, **BASE_500}
    reference = reference_of(BY_NAME[name], one, tmp_path / "theirs", torch.float64)
    layouts = {"sequences": ((), TENSOR), "tensors": ((), TENSOR_ALONE)}
    check_layouts(reference, gloo_pool, layouts, {})
    narrow = reference_of(BY_NAME[name], one, tmp_path / "narrow")
    check_loaded_weights(narrow, gloo_pool, 2, TENSOR)


def test_tensor_parallel_latents_have_every_gradient_without_experts(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """Without sequence parallelism, which experts would require."""
    family = BY_NAME["deepseek_v2"]
    changes = {**family.variants["yarn"], "first_k_dense_replace": 2}
    reference = reference_of(family, changes, tmp_path / "theirs", torch.float64)
    dense = {"model.num_moe_experts": None, "model.moe_ffn_hidden_size": None}
    check_layouts(reference, gloo_pool, {"tensors": ((), TENSOR_ALONE)}, dense)


MORE_RANKS = {
    "llama: attention bias, tied": {
        "one rank": (1, {}),
        "stages in turn": (2, VIRTUAL_STAGES),
        "tensors and stages": (4, {**TENSOR, **STAGES}),
    },
    "mixtral: two of four": {
        "experts by tensors": (2, {**TENSOR, **EXPERT_TENSOR}),
        "tensors, experts whole": (2, {**TENSOR, **EXPERTS}),
        "all of it": (4, {**TENSOR, **EXPERT_TENSOR, **EXPERTS}),
        "experts and stages": (4, {**STAGES, **EXPERTS}),
        "stages in turn": (2, VIRTUAL_STAGES),
    },
    "deepseek_v2: yarn": {"experts by tensors": (2, {**TENSOR, **EXPERT_TENSOR})},
}
"""Case -> name -> number of ranks and sizes."""


@pytest.mark.exhaustive(by=lambda label: [label] if label.startswith("mixtral") else [])
@pytest.mark.parametrize("label", MORE_RANKS)
def test_every_layout_loads_the_same_weights(
    label: str, gloo_pool: GlooPool, tmp_path: Path
) -> None:
    family, changes = CASES[label]
    deeper = {"num_hidden_layers": 4, **changes}
    reference = reference_of(family, deeper, tmp_path / "theirs")
    for ranks, layout in MORE_RANKS[label].values():
        check_loaded_weights(reference, gloo_pool, ranks, layout)
