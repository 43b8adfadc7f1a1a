"""Load a Hugging Face folder into a built model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from ascend_run.core.checkpoint.regions import (
    ShardedLocal,
    model_shards,
    sharded_tensors,
    unwrapped,
)
from ascend_run.core.model.layer_slots import count_layers
from ascend_run.ops.linear.stored_weight import filled
from ascend_run.plugin_api.contracts import ModelBundle, ModelFamily, TensorShard
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.types.config import FieldSection, RunConfig

from .importing import matched_weights

_PREFIX: Final = "model"


def load_model(
    folder: str | Path, family: ModelFamily, config: RunConfig, bundle: ModelBundle
) -> list[str]:
    """Replace this rank's initial weights by those of a Hugging Face folder.

    Call it on every rank, before the optimizer copies the parameters. Vocabulary padding keeps its
    initial zeros, and parameters added by a plugin (marked ``ascend_added_by``) keep their values.

    Returns:
        Names of the parameters that keep theirs for want of a counterpart: a new score head.

    Raises:
        CheckpointError: See ``load_hf_weights``; the weights are unchanged then.
    """
    tensors = [
        held
        for held in sharded_tensors(bundle.chunks, vocab_size=config.model.vocab_size, stored=True)
        if not getattr(held.tensor, "ascend_added_by", None)
    ]
    # The folder has no empty layer slots.
    model, experts = unwrapped(bundle.chunks[0]), moe_layers(config.model)
    layers = {**config.model, "num_layers": count_layers(model)}
    if experts:
        numbers = enumerate(model.layer_numbers)
        layers["moe_layer_freq"] = [
            int(p in experts) for p, number in numbers if number is not None
        ]
    config = attrs.evolve(config, model=FieldSection(layers))
    with matched_weights(folder, family, config, _shards(tensors)) as (fill, lacking):
        for held in tensors:
            with filled(held.tensor) as values:
                for shard in _shards([attrs.evolve(held, tensor=values)]):
                    fill(shard)
    return lacking


def _shards(tensors: Sequence[ShardedLocal]) -> list[TensorShard]:
    return [
        attrs.evolve(shard, key=shard.key.removeprefix(f"{_PREFIX}/"))
        for shard in model_shards(tensors, _PREFIX)
    ]
