"""Training steps of adapters on two ranks of one thread each; one JSON line."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ascend_run.testing.pool import GlooPool

from .adapter_steps import LAYOUTS
from .adapter_steps_rank import RANKS, SYSTEMS, one_rank

SECONDS: Final = 600
"""Limit of one process."""


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
    with GlooPool() as pool:
        asked = (options.system, options.layout, options.steps, options.warmup)
        results = pool.run(one_rank, RANKS, *asked, timeout=SECONDS)
    print(json.dumps(of_all_ranks(results)))


if __name__ == "__main__":
    main()
