"""One rank's training steps of adapters, on one thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from ascend_run.testing.models import DENSE
from tests.support.small_runs import training

from .adapter_steps import FEATURES

RANKS: Final = 2
SYSTEMS: Final[Mapping[str, Sequence[str]]] = {
    "lora": ("lora",),
    **{feature: ("lora", feature) for feature in FEATURES},
}
SHAPE: Final[Mapping[str, Any]] = {
    "model.num_layers": 4,
    "model.hidden_size": 512,
    "model.ffn_hidden_size": 1408,
    "model.num_attention_heads": 8,
    "model.num_query_groups": 8,
    "model.kv_channels": 64,
    "model.vocab_size": 2048,
    "data.seq_length": 512,
    "train.global_batch_size": 2,
    "plugins.lora.rank": 16,
}


def one_rank(
    system: str, layout: str, steps: int, warmup: int, shape: Mapping[str, Any] = SHAPE
) -> dict[str, Any]:
    """Return the losses of all steps, and the seconds of the timed ones."""
    torch.set_num_threads(1)
    values = {
        **DENSE,
        **shape,
        "plugins.lora.export": False,
        "parallel.tensor_model_parallel_size": RANKS,
        "parallel.sequence_parallel": layout == "sequence",
    }
    losses, seconds = [], []
    with training(values, SYSTEMS[system]) as run:
        for _ in range(warmup + steps):
            dist.barrier()
            begin = time.perf_counter()
            losses.append(run.step().loss)
            seconds.append(time.perf_counter() - begin)
    tokens = values["data.seq_length"] * values["train.global_batch_size"]
    return {"losses": losses, "seconds": seconds[warmup:], "tokens": tokens}
