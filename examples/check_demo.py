"""Whether the demo learnt: ``check_demo.py RUN_FOLDER``. Exit code 1 and the reason where not."""

from __future__ import annotations

import json
import math
import sys
import tomllib
from pathlib import Path

START_TOLERANCE = 0.03
"""An untrained model guesses evenly among the tokens: its loss is ln(vocabulary)."""
END_SHARE = 0.56
"""Of the loss at the start, on files that training has not read. Recorded: 53 %; the files are
those of the installed Python, and bf16 rounds differently on another processor."""


def problems(folder: Path) -> list[str]:
    """What is not as promised of a run, by its ``metrics.jsonl`` and ``config.toml``."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [record["eval_loss"] for record in records if "eval_loss" in record]
    if len(losses) < 2:
        return [f"{len(losses)} evaluations in {folder}, expected one at each end"]
    vocabulary = tomllib.loads((folder / "config.toml").read_text())["model"]["vocab_size"]
    start, end, even = losses[0], losses[-1], math.log(vocabulary)
    found = []
    if not abs(start / even - 1) <= START_TOLERANCE:
        found.append(
            f"the held-out loss starts at {start:.4f}, expected within {START_TOLERANCE:.0%} of "
            f"ln {vocabulary} = {even:.4f}"
        )
    if not end < END_SHARE * start:
        found.append(f"it ends at {end / start:.1%} of its start, expected below {END_SHARE:.0%}")
    return found


def main() -> int:
    found = problems(Path(sys.argv[1]))
    for problem in found:
        print(f"demo: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
