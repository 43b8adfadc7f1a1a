"""Every family of ``cases``: logits, gradients, config.json and weights, against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.core.hugging_face.json_files import read_hf_config
from ascend_run.plugin_api import Claim, ConfigError, ModelFamily
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from ascend_run.registry.discovery import discover
from ascend_run.testing.pool import GlooPool
from tests.support import family_checks
from tests.support.against_transformers import (
    TENSOR_PARALLEL,
    Reference,
    check_one_rank,
    check_two_ranks,
)

from .cases import BY_NAME, CASES, FAMILIES, Family
from .published import BUFFERS, publish

CATALOGUE = discover()
PLUGINS = {family.name: CATALOGUE.load([family.name])[family.name] for family in FAMILIES}


def record(family: Family) -> ModelFamily:
    """Return our record of a family."""
    found: ModelFamily = PLUGINS[family.name]().ascend_model_family()
    return found


@pytest.fixture(params=CASES.values(), ids=[*CASES])
def case(request: pytest.FixtureRequest) -> tuple[Family, dict[str, Any]]:
    return request.param


def reference_of(family: Family, changes: Mapping[str, Any], folder: Path) -> Reference:
    """Write a random model of a family, and compute its results."""
    model = family.model(**changes)
    reference = Reference(family.name, model, folder, family.in_our_layout)
    if family.publish:
        publish(folder, family.publish, model.config)
    return reference


@pytest.fixture
def reference(case: tuple[Family, dict[str, Any]], tmp_path: Path) -> Reference:
    return reference_of(*case, tmp_path / "theirs")


def test_logits_and_every_gradient_are_those_of_transformers(
    reference: Reference, gloo_pool: GlooPool
) -> None:
    check_one_rank(reference, gloo_pool)


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


def test_plugin_has_its_name_and_owns_the_seam(family: Family) -> None:
    plugin = PLUGINS[family.name]
    assert plugin.manifest.name == family.name
    assert claims_of(plugin) == (Claim.MODEL_FAMILY,)


def test_every_key_is_named_once(family: Family) -> None:
    family_checks.check_keys_are_named_once(record(family), family.shared)


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.publish is None])
def test_missing_keys_mean_what_they_mean_to_transformers(name: str) -> None:
    from transformers import AutoConfig

    family = BY_NAME[name]
    kind = type(AutoConfig.for_model(family.reference))
    required = family_checks.LLAMA_LIKE | family.required
    family_checks.check_transformers_defaults(record(family), kind, required)


def test_unknown_and_changed_keys_are_refused(family: Family, tmp_path: Path) -> None:
    model = family.model()
    model.save_pretrained(tmp_path)
    if family.publish:
        publish(tmp_path, family.publish, model.config)
    found = read_hf_config(tmp_path)
    assert config_from_hf(record(family), found)
    with pytest.raises(ConfigError, match="unknown key 'hiden_size'; did you mean"):
        config_from_hf(record(family), {**found, "hiden_size": 3})
    for name in record(family).fixed:
        with pytest.raises(ConfigError, match=f"{name} is 'other'; only "):
            config_from_hf(record(family), {**found, name: "other"})


SHARDED = (
    "llama: biases",
    "phi3: window",
    "internlm2: plain",
    "gemma2: low caps",
    "chatglm: half rotated",
)
"""Those that differ in how their tensors are stored or sharded."""


@pytest.mark.parametrize("label", SHARDED)
def test_two_tensor_parallel_ranks_have_every_gradient(
    label: str, gloo_pool: GlooPool, tmp_path: Path
) -> None:
    check_two_ranks(reference_of(*CASES[label], tmp_path / "theirs"), gloo_pool, TENSOR_PARALLEL)


@pytest.mark.parametrize("label", ["qwen2_moe: normalized", "qwen3_moe: not normalized, tied"])
def test_two_expert_parallel_ranks_have_every_gradient(
    label: str, gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """Both ranks see the same batch, so an expert accumulates the gradients of both."""
    check_two_ranks(
        reference_of(*CASES[label], tmp_path / "theirs"),
        gloo_pool,
        ["parallel.expert_model_parallel_size=2"],
        times=lambda name: 2 if ".mlp.experts." in name else 1,
    )
