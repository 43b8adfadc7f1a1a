"""Train a Llama on gloo ranks; print its parameters, and the bytes on each rank between steps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Final

import attrs

from ascend_run.testing.pool import GlooPool
from benchmarks import llama
from benchmarks.optimizer_states_rank import hold
from benchmarks.our_run import values

STEPS: Final = 2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable", nargs="*", default=[])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", choices=llama.SHAPES, default="36m")
    options = parser.parse_args(arguments)
    shape = llama.SHAPES[options.shape]
    given = {
        # Tokens leave nothing behind.
        **values(attrs.evolve(shape, seq_length=64, micro_batch=1), "bf16"),
        "train.global_batch_size": options.ranks,
        "ddp.use_distributed_optimizer": options.ranks > 1,
    }
    with GlooPool() as pool:
        held = pool.run(hold, options.ranks, given, options.enable, STEPS, timeout=300)
    ranks = [attrs.asdict(one) for one in held]
    print(json.dumps({"parameters": shape.num_parameters(), "ranks": ranks}))


if __name__ == "__main__":
    main()
