"""Training steps of adapters on two ranks of one thread each; one JSON line."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import training

from .adapter_steps import FEATURES, LAYOUTS

RANKS: Final = 2
SECONDS: Final = 600
"""Limit of one process."""
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


def of_all_ranks(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the losses, and tokens per second: the time of a step is that of its slowest rank."""
    steps = [max(both) for both in zip(*(one["seconds"] for one in results), strict=True)]
    tokens = results[0]["tokens"]
    return {
        "losses": results[0]["losses"],
        "tokens_per_second": tokens / statistics.median(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=[*SYSTEMS])
    parser.add_argument("--layout", choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    options = parser.parse_args()
    from .adapter_steps_worker import one_rank as job  # by a name that ranks can import

    with GlooPool() as pool:
        asked = (options.system, options.layout, options.steps, options.warmup)
        results = pool.run(job, RANKS, *asked, timeout=SECONDS)
    print(json.dumps(of_all_ranks(results)))


if __name__ == "__main__":
    main()
