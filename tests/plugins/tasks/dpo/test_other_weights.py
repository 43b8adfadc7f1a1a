"""A dry run's reference is another model than the policy, and the same one in each layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Shard
from ascend_run.testing.tensors import assemble
from tests.support.preference_files import write_pairs
from tests.support.small_runs import standing_rank
from tests.support.tiny_llama import write_llama

ROLES = ("policy", "reference")


def weights(values: Mapping[str, Any]) -> dict[str, list[Shard]]:
    """Return this rank's shards of both models. A job for the pool."""
    from ascend_run.testing.dry_run import DryRun
    from ascend_run.testing.parameter_shards import parameter_shards

    with standing_rank(values) as (hooks, context):
        dry_run = DryRun(hooks, context)
        dry_run.build(with_optimizer=False)
        dry_run.load_weights()
        return {
            role: [
                Shard(
                    name=shard.name,
                    tensor=None if shard.tensor is None else shard.tensor.clone(),
                    offset=shard.offset,
                    global_shape=shard.global_shape,
                )
                for shard in parameter_shards(
                    context.models[role].chunks, values["model.vocab_size"], Tensor.detach
                )
                if shard.is_parameter
            ]
            for role in ROLES
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pairs(tmp_path_factory.mktemp("pairs"), 4)
    write_llama(folder / "model")
    return folder


MODELS: dict[str, Mapping[str, Any]] = {
    "dense": DENSE,
    "experts": {**MOE, "model.moe_aux_loss_coeff": 0.0},
    "loaded": {**DENSE, "model.num_attention_heads": 4, "model.hf_path": "model"},
}
SPLIT = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
def test_it_is_another_model_and_the_same_in_each_layout(
    gloo_pool: GlooPool, folder: Path, model: str
) -> None:
    values = {
        **MODELS[model],
        "task": "dpo",
        "model.vocab_size": 400,
        "data.train": [str(folder / "train.jsonl")],
        "data.tokenizer": str(folder / "tokenizer"),
    }
    if "model.hf_path" in values:
        values["model.hf_path"] = str(folder / "model")
    one = gloo_pool.run(weights, 1, values, timeout=100)
    two = gloo_pool.run(weights, 2, {**values, **SPLIT}, timeout=100)
    full = {role: assemble(rank[role] for rank in one).tensors for role in ROLES}
    for role in ROLES:
        again = assemble(rank[role] for rank in two).tensors
        assert again.keys() == full[role].keys()
        assert all(torch.equal(again[name], value) for name, value in full[role].items())
    for name, value in full["policy"].items():
        noise = full["reference"][name] - value
        assert 0.01 < float(noise.std()) < 0.1, name
