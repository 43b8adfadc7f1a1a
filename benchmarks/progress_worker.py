"""Time updates of the progress display that draw nothing; prints one JSON line."""

from __future__ import annotations

import argparse
import io
import json
import time

from ascend_run.core.log.progress import Progress

READINGS = {"loss": 3.2, "lr": 2.9e-4, "tokens_per_second": 12345.6, "grad_norm": 1.0}
UPDATES = 100_000


def nanoseconds() -> float:
    """Return the time of one update, including the loop; nothing is drawn for seconds."""
    with Progress(total=UPDATES, stream=io.StringIO()) as progress:
        progress.update(0, READINGS)
        begin = time.perf_counter_ns()
        for step in range(1, UPDATES + 1):
            progress.update(step, READINGS)
        return (time.perf_counter_ns() - begin) / UPDATES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    print(json.dumps({"nanoseconds": [nanoseconds() for _ in range(repeats)]}))


if __name__ == "__main__":
    main()
