"""Record the allocations of a Llama's first steps, and replay them with one pool and two.

Prints one JSON line: the bytes that a caching allocator reserves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ascend_run.ops.memory.allocation_trace import Allocation, replay
from ascend_run.testing.pool import GlooPool
from benchmarks import llama
from benchmarks.allocation_trace_rank import record
from benchmarks.our_run import values


def recorded(
    pool: GlooPool, shape: llama.Shape, micro_batches: int = 4, steps: int = 2
) -> list[Allocation]:
    """Return the allocations of a run in bf16 on one rank."""
    given = values(shape, "bf16")
    given["train.global_batch_size"] = micro_batches * shape.micro_batch
    trace: list[Allocation]
    (trace,) = pool.run(record, 1, given, steps, timeout=600)
    return trace


def reserved(trace: Sequence[Allocation], factor: int) -> dict[str, int]:
    """Return the number of records, and the bytes that one pool and two reserve.

    Args:
        factor: Of the size of every tensor.
    """
    scaled = [one._replace(nbytes=factor * one.nbytes) for one in trace]
    one, two = (replay(scaled, separate=separate) for separate in (False, True))
    return {
        "allocations": len(trace),
        "allocated": one.allocated,
        "one_pool": one.reserved,
        "two_pools": two.reserved,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--factor", type=int, default=1)
    options = parser.parse_args()
    with GlooPool() as pool:
        trace = recorded(pool, llama.SHAPES["36m"])
    print(json.dumps(reserved(trace, options.factor)))


if __name__ == "__main__":
    main()
