"""Train, and measure the time of each step's fingerprint; prints one JSON line.

A real run: the same preparation, kernel and loop as in the command. All methods of the fingerprint
are timed, including those that write to the run folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def timed(owner: type, method: str, spent: list[float], seen: dict[type, Any]) -> None:
    """Add the seconds of each call to the last element of ``spent``, and record its object."""
    inner: Callable[..., Any] = getattr(owner, method)

    def outer(self: Any, *args: Any) -> Any:
        seen[owner] = self
        began = time.perf_counter()
        try:
            return inner(self, *args)
        finally:
            spent[-1] += time.perf_counter() - began

    setattr(owner, method, outer)


def train_and_time(file: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the seconds of each step's fingerprint, the median seconds of a step, and the number
    of sampled elements."""
    from ascend_run.core.fingerprint.reading import RowHashes
    from ascend_run.core.log.metrics import read_metrics
    from ascend_run.core.run import run_training
    from ascend_run.core.train.fingerprints import StepFingerprints
    from ascend_run.core.train.loop import Loop
    from ascend_run.prepare.prepare import prepare
    from ascend_run.tools.pages.fingerprint_file import read_fingerprints

    from .silent_plugins import before_each_step

    spent = [0.0]
    seen: dict[type, Any] = {}
    timed(StepFingerprints, "add", spent, seen)
    timed(RowHashes, "_add", spent, seen)
    timed(Loop, "_record_fingerprints", spent, seen)
    prepared = prepare(file, overrides)
    run_training(prepared.run_request(before_each_step(lambda: spent.append(0.0))))
    folder = Path(prepared.config.run.output_dir)
    history = read_metrics(folder / "metrics.jsonl")
    seconds = [record["step_seconds"] for record in history.records if "loss" in record]
    warm = len(seconds) // 3
    groups = seen[StepFingerprints]._samples
    return {
        "spent_seconds": spent[1 + warm :],
        "step_seconds": statistics.median(seconds[warm:]),
        "entries": len(read_fingerprints(folder).entries),
        "elements": sum(group.salt.size for group in groups),
        "tensors": sum(len(group.indices) for group in groups),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    print(json.dumps(train_and_time(options.config, options.overrides)))


if __name__ == "__main__":
    main()
