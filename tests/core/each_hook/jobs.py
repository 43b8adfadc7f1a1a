"""What the pool's ranks do for the hooks that need more than one of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from ascend_run.core.data.batches import micro_batches
from ascend_run.core.run import batch_plan, cut_to_rank
from ascend_run.plugin_api import Claim
from ascend_run.plugin_api.testing.models import DENSE, samples
from tests.support.fake_plugins import plugin
from tests.support.probed_runs import built, probe

SMALLEST: Final = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 90,
    "make_vocab_size_divisible_by": 8,
}


def _take_place() -> None:
    """The variables of a launcher; the pool puts the environment back."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)


def own_groups(folder: str) -> dict[str, list[int]]:
    """The groups that a plugin planned and that this rank finds: name -> ranks."""
    _take_place()

    def plan(self: Any, layout: Any) -> Any:
        assert layout.world_size == 2
        return {"last": [[1]], "each": [[0], [1]], "both": [[0, 1]]}

    values = {"train.global_batch_size": 2}
    with built(Path(folder), probe("ascend_process_groups", plan), values=values) as (_, context):
        return {
            name: dist.get_process_group_ranks(getattr(context.groups, name))
            for name in ("both", "each", "last")
            if hasattr(context.groups, name)
        }


class Backwards:
    """contracts.SequencePartition: the last rank holds the first part."""

    multiple = 1

    def chunks(self, seq_length: int, rank: int, size: int) -> list[tuple[int, int]]:
        part, place = seq_length // size, size - 1 - rank
        return [(place * part, (place + 1) * part)]


def cut_backwards(folder: str) -> dict[str, list[int]]:
    """Positions that this rank holds, by batch and by rotary table."""
    _take_place()
    before: list[list[int]] = []

    def look(self: Any) -> Any:
        def wrap(batches: Any) -> Any:
            for batch in batches:
                before.append(batch.tensors["position_ids"][0].tolist())
                yield batch

        return wrap

    partition = plugin(
        "backwards",
        {"ascend_sequence_partition": lambda self: Backwards(), "ascend_batch": look},
        claims=(Claim.SEQUENCE_EXCHANGE,),
    )()
    # Ulysses lets the run be prepared; the first to answer, which is ours, cuts.
    values = {"parallel.context_parallel_size": 2, "enable": ["ulysses"]}
    with built(Path(folder), partition, values=values) as (hooks, context):
        task = hooks.require("ascend_task", config=context.config)
        plan = batch_plan(context.config, context.layout)
        source = micro_batches(samples(DENSE, 1), task.batch_fields, plan)
        wrapped = hooks.wrap("ascend_batch", source, config=context.config)
        (batch,) = cut_to_rank(wrapped, hooks, context)
        model = context.models["policy"].chunks[0].module
        return {
            "batch": batch.tensors["position_ids"][0].tolist(),
            "rotary": model.rotary.positions(16).tolist(),
            "before the cut": before[0],
        }
