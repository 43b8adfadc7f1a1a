"""Runs with adapters that PEFT has saved, with random A and B, on the kit's models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ascend_run.testing.models import DENSE, MODELS
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Trial, run_trial
from ascend_run.testing.tensors import differences, full_tensors
from ascend_run.types.layout import axis_settings, world_size

RANK = 4
TARGET_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
STACKED = ((".base_layer", 96, 32), ("", 32, 48))
"""Where PEFT has the adapters of these, and the rows and columns of an expert's weight."""


def write_adapter(folder: Path, dense: Sequence[int] = (), experts: Sequence[int] = ()) -> str:
    """Write random adapters for the conformance kit's models, in PEFT's format.

    Args:
        dense: Layers with a dense MLP, which has some.
        experts: Layers whose four routed experts have some.
    """
    hidden, feed, heads, groups, width = 32, 48, 8, 2, 4
    attention = {
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (groups * width, hidden),
        "self_attn.v_proj": (groups * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
    }
    mlp = {
        "mlp.gate_proj": (feed, hidden),
        "mlp.up_proj": (feed, hidden),
        "mlp.down_proj": (hidden, feed),
    }
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for layer in range(2):
        for module, (rows, columns) in {**attention, **(mlp if layer in dense else {})}.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                drawn = torch.randn(shape, generator=generator) * 0.2
                tensors[f"{name}.lora_{part}.weight"] = drawn
        for module, rows, columns in STACKED if layer in experts else ():
            name = f"base_model.model.model.layers.{layer}.mlp.experts{module}"
            for part, shape in (("A", (4 * RANK, columns)), ("B", (rows, RANK * 4))):
                drawn = torch.randn(shape, generator=generator) * 0.2
                tensors[f"{name}.lora_{part}.weight"] = drawn
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": RANK,
                "lora_alpha": 6,
                "target_parameters": [*TARGET_PARAMETERS] if experts else None,
            }
        )
    )
    return str(folder)


def run_with_biases(trial: Trial) -> RankOutcome:
    """Run a trial whose linears' biases, if it has any, are not 0 as they are initialized; they
    depend on their name and index in the full tensor. A rank's job."""
    from ascend_run.testing.dry_run import DryRun
    from ascend_run.testing.parameter_shards import parameter_shards

    built = DryRun.build

    def build(self: DryRun, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        vocabulary = self.context.config.model.vocab_size
        for shard in parameter_shards(self.bundle.chunks, vocabulary, Tensor.detach):
            if shard.tensor is not None and re.fullmatch(r".+\.linear_\w+\.bias", shard.name):
                index = torch.arange(len(shard.tensor)) + shard.offset[0] + len(shard.name)
                shard.tensor.copy_(0.5 * torch.sin(index.double()))

    with patch.object(DryRun, "build", build):
        return run_trial(trial)


class Trials:
    """Runs with adapters on the kit's batches."""

    def __init__(self, pool: GlooPool, folder: Path) -> None:
        self.pool = pool
        self.adapters = {
            "dense": write_adapter(folder / "dense", dense=(0, 1)),
            "moe": write_adapter(folder / "moe"),
            "experts": write_adapter(folder / "experts", experts=(0, 1)),
            "mixed": write_adapter(folder / "mixed", dense=(0,), experts=(1,)),
        }
        experts = {**MODELS["moe"], "plugins.lora.target_modules": ["all-linear", "experts"]}
        mixed = {**experts, "model.moe_layer_freq": [0, 1]}
        self.models = {**MODELS, "experts": experts, "mixed": mixed}
        self.made: dict[str, list[RankOutcome]] = {}

    def __call__(
        self,
        model: str,
        layout: Mapping[str, int],
        beside: Sequence[str] = (),
        steps: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> list[RankOutcome]:
        ranks = world_size(layout)
        values = {
            **self.models[model],
            "plugins.lora.rank": RANK,
            "plugins.lora.alpha": 6.0,
            "plugins.lora.load": self.adapters[model],
            **axis_settings(layout),
            "parallel.sequence_parallel": bool(layout.get("sp", layout.get("tp", 1) > 1)),
            **(config or {}),
        }
        trial = Trial(plugins=("lora", *beside), config=values, steps=steps)
        key = f"{ranks} {trial}"
        if key not in self.made:
            self.made[key] = self.pool.run(run_with_biases, ranks, trial, timeout=100)
        return self.made[key]


def assert_parity(
    outcomes: Sequence[RankOutcome], plain: Sequence[RankOutcome], tolerance: float
) -> None:
    got, want = full_tensors(outcomes), full_tensors(plain)
    assert got.problems(tolerance) == []
    assert list(differences(got.tensors, want.tensors, tolerance)) == []
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(plain[0].losses, rel=tolerance)
        assert outcome.grad_norms == pytest.approx(plain[0].grad_norms, rel=tolerance)
    assert all(".adapter.lora_" in name for name in want.tensors)


def assert_resumed_without_change(
    pool: GlooPool, plugins: Sequence[str], config: Mapping[str, Any], folder: Path
) -> None:
    """Four steps on two ranks change no bit if they are resumed after two, and the checkpoint has
    the keys of lora's."""

    def trained(names: Sequence[str], steps: int, checkpoints: str) -> RankOutcome:
        values = {**DENSE, **config, "plugins.lora.export": False}
        trial = Trial(
            plugins=tuple(names), config=values, steps=steps, checkpoints=str(folder / checkpoints)
        )
        found: RankOutcome = pool.run(run_trial, 2, trial)[0]
        return found

    whole = trained(plugins, 4, "whole")
    trained(plugins, 2, "twice")
    resumed = trained(plugins, 4, "twice")
    assert resumed.state.keys() == whole.state.keys()
    for name, tensor in whole.state.items():
        assert torch.equal(tensor, resumed.state[name]), name
    assert trained(("lora",), 4, "alone").state.keys() == whole.state.keys()
