"""Every family of ``cases``: logits, gradients, config.json and weights, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.hugging_face.json_files import read_hf_config
from ascend_run.plugin_api import Claim, ConfigError, ModelFamily
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from ascend_run.registry.discovery import discover
from ascend_run.testing.pool import GlooPool
from tests.support import family_checks
from tests.support.against_transformers import Reference, check_one_rank

from .cases import CASES, FAMILIES, Family

CATALOGUE = discover()
PLUGINS = {family.name: CATALOGUE.load([family.name])[family.name] for family in FAMILIES}


def record(family: Family) -> ModelFamily:
    """Return our record of a family."""
    found: ModelFamily = PLUGINS[family.name]().ascend_model_family()
    return found


@pytest.fixture(params=CASES.values(), ids=[*CASES])
def case(request: pytest.FixtureRequest) -> tuple[Family, dict[str, Any]]:
    return request.param


@pytest.fixture
def reference(case: tuple[Family, dict[str, Any]], tmp_path: Path) -> Reference:
    family, changes = case
    folder = tmp_path / "theirs"
    return Reference(family.name, family.model(**changes), folder, family.in_our_layout)


def test_logits_and_every_gradient_are_those_of_transformers(
    reference: Reference, gloo_pool: GlooPool
) -> None:
    check_one_rank(reference, gloo_pool)


def test_config_and_weights_return_bit_for_bit(
    case: tuple[Family, dict[str, Any]], reference: Reference, tmp_path: Path
) -> None:
    family, _ = case
    shapes = {name: tuple(weight.shape) for name, weight in reference.weights.items()}
    family_checks.check_config_round_trip(record(family), reference.folder)
    family_checks.check_weights_round_trip(record(family), reference.folder, shapes, tmp_path)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def test_plugin_has_its_name_and_owns_the_seam(family: Family) -> None:
    plugin = PLUGINS[family.name]
    assert plugin.manifest.name == family.name
    assert claims_of(plugin) == (Claim.MODEL_FAMILY,)


def test_every_key_is_named_once(family: Family) -> None:
    family_checks.check_keys_are_named_once(record(family))


def test_missing_keys_mean_what_they_mean_to_transformers(family: Family) -> None:
    from transformers import AutoConfig

    kind = type(AutoConfig.for_model(family.reference))
    required = family_checks.LLAMA_LIKE | family.required
    family_checks.check_transformers_defaults(record(family), kind, required)


def test_unknown_and_changed_keys_are_refused(family: Family, tmp_path: Path) -> None:
    family.model().config.save_pretrained(tmp_path)
    found = read_hf_config(tmp_path)
    assert config_from_hf(record(family), found)
    with pytest.raises(ConfigError, match="unknown key 'hiden_size'; did you mean"):
        config_from_hf(record(family), {**found, "hiden_size": 3})
    for name, only in record(family).fixed.items():
        with pytest.raises(ConfigError, match=f"{name} is 'other'; only {only!r}"):
            config_from_hf(record(family), {**found, name: "other"})
