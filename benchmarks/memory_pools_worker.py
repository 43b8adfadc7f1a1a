"""Record the allocations of a Llama's first steps, and replay them with one pool and two.

Prints one JSON line: the bytes that a caching allocator reserves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ascend_run.ops.memory.allocation_trace import replay
from ascend_run.testing.pool import GlooPool
from benchmarks import llama
from benchmarks.allocation_trace_rank import record
from benchmarks.our_run import values


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=llama.SHAPES, default="36m")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--factor", type=int, default=1, help="of the size of every tensor")
    options = parser.parse_args(arguments)
    shape = llama.SHAPES[options.shape]
    given = values(shape, "bf16")
    given["train.global_batch_size"] = options.micro_batches * shape.micro_batch
    with GlooPool() as pool:
        (trace,) = pool.run(record, 1, given, options.steps, timeout=600)
    trace = [one._replace(nbytes=options.factor * one.nbytes) for one in trace]
    one, two = (replay(trace, separate=separate) for separate in (False, True))
    result = {"one_pool": one.reserved, "two_pools": two.reserved, "allocated": one.allocated}
    print(json.dumps({"allocations": len(trace), **result}))


if __name__ == "__main__":
    main()
