"""Train a Llama on gloo ranks; print its parameters, and the bytes on each rank between steps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, Final

import attrs

from ascend_run.testing.pool import GlooPool
from benchmarks import llama
from benchmarks.optimizer_states_rank import hold
from benchmarks.our_run import values

STEPS: Final = 2


def measured(
    pool: GlooPool, shape: llama.Shape, ranks: int, enable: Sequence[str]
) -> dict[str, Any]:
    """Return the number of parameters, and ``Held`` of each rank."""
    given = {
        # Tokens leave nothing behind.
        **values(attrs.evolve(shape, seq_length=64, micro_batch=1), "bf16"),
        "train.global_batch_size": ranks,
        "ddp.use_distributed_optimizer": ranks > 1,
    }
    held = pool.run(hold, ranks, given, enable, STEPS, timeout=300)
    return {"parameters": shape.num_parameters(), "ranks": [attrs.asdict(one) for one in held]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable", nargs="*", default=[])
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    with GlooPool() as pool:
        result = measured(pool, llama.SHAPES["36m"], options.ranks, options.enable)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
