"""Whether preferences were learnt: ``check_dpo.py RUN_FOLDER ...``. Exit code 1 and the reasons."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

METRIC = "eval_rewards/accuracies"
START, END = 0.6, 0.8
"""Share of held-out pairs that a run has right: at most this before its first step, and at least
that after its last one. Where policy and reference are equal, no pair is right."""


def problems(folder: Path, least: float) -> list[str]:
    """What is not as promised of a run, by its ``metrics.jsonl``."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    shares = [record[METRIC] for record in records if METRIC in record]
    if len(shares) < 2:
        return [f"{folder}: {len(shares)} evaluations, expected one at each end"]
    start, end = shares[0], shares[-1]
    print(f"{folder}: {METRIC} {start:.1%} -> {end:.1%}")
    found = []
    if not start <= START:
        found.append(f"{folder}: {METRIC} starts at {start:.1%}, expected at most {START:.0%}")
    if not end >= least:
        found.append(f"{folder}: {METRIC} ends at {end:.1%}, expected at least {least:.0%}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--least", type=float, default=100 * END, metavar="PERCENT")
    asked = parser.parse_args()
    found = [problem for each in asked.folders for problem in problems(each, asked.least / 100)]
    for problem in found:
        print(f"preferences: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
