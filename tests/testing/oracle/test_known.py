"""Every field of ``[model]`` is read by the oracle, or it says what it does with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch

from ascend_run.testing.models import MODELS, samples
from ascend_run.testing.oracle import training
from ascend_run.testing.oracle.known import NO_EFFECT, UNKNOWN, unknown
from ascend_run.testing.oracle.model import GPT
from ascend_run.types.config import FieldSection, RunConfig
from tests.support.oracle_cases import CASES, DROPPING
from tests.support.small_runs import prepare

LONGROPE: Mapping[str, Any] = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 2.5]}
SCALINGS: Sequence[Mapping[str, Any]] = (
    {"type": "yarn"},
    {"type": "longrope", **LONGROPE},
    {"type": "longrope", **LONGROPE, "original_max_position_embeddings": 8},
    {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)


@contextmanager
def recorded() -> Iterator[set[str]]:
    """Record the fields that are read of ``[model]``."""
    read: set[str] = set()
    inner = FieldSection.__getattr__

    def noting(self: FieldSection, name: str) -> Any:
        read.add(name)
        return inner(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FieldSection, "__getattr__", noting)
        yield read


def configs() -> Iterator[RunConfig]:
    for case in (*CASES.values(), *DROPPING.values()):
        yield prepare({**MODELS[case.model], **case.config}, case.enable).config
    for parameters in SCALINGS:
        given = {"factor": 2.0, **parameters}
        keys = {f"model.rope_scaling_{name}": value for name, value in given.items()}
        yield prepare({**MODELS["dense"], **keys}).config


def compute(config: RunConfig) -> None:
    """Take a step with random weights."""
    keys = {"model.vocab_size": config.model.vocab_size, "data.seq_length": config.data.seq_length}
    rows = samples(keys, config.train.global_batch_size)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    weights = {name: torch.randn_like(p) for name, p in GPT(config).named_parameters()}
    (step,) = training.steps(config, weights, batch, 1)
    assert step.loss > 0


@pytest.mark.needs_plugins("alibi", "eod-reset", "lora", "noop-layers")
def test_every_field_is_read_or_listed() -> None:
    given = [*configs()]
    with recorded() as read:
        for config in given:
            compute(config)
    fields = {*given[0].model}
    assert fields - read - NO_EFFECT - UNKNOWN.keys() == set()
    assert read & NO_EFFECT <= {"family"}  # read for the families with ALiBi
    assert read.isdisjoint(UNKNOWN)
    assert NO_EFFECT.isdisjoint(UNKNOWN)
    assert fields >= NO_EFFECT | UNKNOWN.keys()


def test_defaults_are_known_and_other_values_are_named() -> None:
    config = prepare(MODELS["moe"]).config
    assert [*unknown(config)] == []
    for name, only in UNKNOWN.items():
        changed = FieldSection({**config.model, name: "another" if only is None else None})
        (said,) = unknown(attrs.evolve(config, model=changed))
        assert said.startswith(f"model.{name}=")


def test_tasks_and_plugins_without_a_formula_are_named() -> None:
    config = attrs.evolve(prepare(MODELS["dense"]).config, task="dpo", enable=("sparse",))
    assert [*unknown(config)] == ["task=dpo", "the plugin sparse"]


def test_weights_of_another_model_are_refused() -> None:
    config = prepare(MODELS["dense"]).config
    weights = dict(GPT(config).named_parameters())
    weights["decoder.layers.0.extra"] = weights.pop("decoder.final_layernorm.weight")
    with pytest.raises(KeyError, match=r"final_layernorm.weight, decoder.layers.0.extra"):
        training.loaded(config, weights)
