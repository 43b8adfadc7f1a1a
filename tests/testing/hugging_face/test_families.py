"""Families against transformers: a right one passes, with its options moved; wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import ModelFamily
from ascend_run.testing.hugging_face.variants import sizes, with_accepted
from ascend_run.testing.offering import offered
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import FamilyOutcome, load_runtime
from tests.testing.bad_plugins.families import SeedOss, seed_oss


class IgnoresTheEpsilon(SeedOss):
    """Of the norms."""

    family = attrs.evolve(
        seed_oss(),
        keys=tuple(key for key in seed_oss().keys if key.hf != "rms_norm_eps"),
        ignored=seed_oss().ignored | {"rms_norm_eps"},
    )


class SwapsGateAndUp(SeedOss):
    """Two tensors of one shape, in the wrong order."""

    family = attrs.evolve(
        seed_oss(),
        tensors=tuple(
            attrs.evolve(tensor, hf=tensor.hf[::-1])
            if tensor.megatron.endswith("linear_fc1.weight")
            else tensor
            for tensor in seed_oss().tensors
        ),
    )


class IsUnknown(SeedOss):
    family = attrs.evolve(seed_oss(), architecture="AnotherForCausalLM")


def compared(name: str, folder: str) -> FamilyOutcome:
    return load_runtime().against_transformers(name, folder)


@pytest.fixture
def outcome_of(gloo_pool: GlooPool, tmp_path: Path) -> Callable[[type[Any]], FamilyOutcome]:
    def outcome(plugin: type[Any]) -> FamilyOutcome:
        with offered(plugin, group="ascend_run.models"):
            (found,) = gloo_pool.run(compared, 1, "seed_oss", str(tmp_path), timeout=120)
        result: FamilyOutcome = found
        return result

    return outcome


def test_a_right_family_passes_with_its_options_moved(outcome_of: Any) -> None:
    found = outcome_of(SeedOss)

    assert found.problems == ()
    assert {*found.moved} == {
        "attention_bias",
        "attention_out_bias",
        "mlp_bias",
        "num_key_value_heads",
        "rope_parameters",
        "tie_word_embeddings",
    }


@pytest.mark.exhaustive(by=lambda plugin: [])
@pytest.mark.parametrize(
    ("plugin", "problem"),
    [
        (SwapsGateAndUp, "tiny: the logits have max error "),
        (IgnoresTheEpsilon, "tiny: the logits have max error "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_family_is_found(outcome_of: Any, plugin: type[Any], problem: str) -> None:
    assert outcome_of(plugin).problems[0].startswith(problem)


def test_a_class_that_transformers_lacks_is_not_compared(outcome_of: Any) -> None:
    assert (
        "has no AnotherForCausalLM; 'seed_oss' is a SeedOss" in outcome_of(IsUnknown).not_compared
    )


def test_sizes_are_those_of_the_familys_keys() -> None:
    family: ModelFamily = seed_oss()
    found = sizes(family)

    assert found["head_dim"] * found["num_attention_heads"] != found["hidden_size"]
    assert found["vocab_size"] % 2 == 1
    assert found.keys() <= {key.hf for key in family.keys} | {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }


def test_changes_that_are_not_accepted_are_left_out() -> None:
    changes = [{"a": 2}, {"b": 2}, {"c": 2}]

    def accepts(values: Any) -> bool:
        return not (values.get("a") == 2 and values.get("b") == 2)

    assert with_accepted({"a": 1}, iter(changes), accepts) == {"a": 2, "c": 2}
    assert with_accepted({"a": 1}, iter(changes), lambda values: True) == {"a": 2, "b": 2, "c": 2}
