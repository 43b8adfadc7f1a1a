"""Train with plugins that count all events; prints one JSON line.

A real run on one rank: the same preparation, kernel and loop as in the command, with the counting
plugins in addition to those of the config.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from .silent_plugins import counting_plugins


def train_and_count(file: Path, overrides: list[str], listeners: int) -> dict[str, Any]:
    """Return the calls of each event, the number of steps, and the median seconds of a step."""
    from ascend_run.core.log.metrics import read_metrics
    from ascend_run.core.run import run_training
    from ascend_run.prepare.prepare import prepare

    prepared = prepare(file, overrides)
    calls: Counter[str] = Counter()
    run_training(prepared.run_request(*counting_plugins(listeners, calls)))
    history = read_metrics(Path(prepared.config.run.output_dir) / "metrics.jsonl")
    seconds = [record["step_seconds"] for record in history.records if "loss" in record]
    later = seconds[len(seconds) // 3 :]  # the first ones warm up
    return {
        "calls": dict(calls),
        "steps": prepared.config.train.train_iters,
        "step_seconds": statistics.median(later),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--listeners", type=int, default=20)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    print(json.dumps(train_and_count(options.config, options.overrides, options.listeners)))


if __name__ == "__main__":
    main()
