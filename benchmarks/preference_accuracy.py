"""The chart of held-out preference accuracy in docs/plugins/tasks/dpo.md and simpo.md.

``bash examples/dpo.sh`` makes the runs, and ``python -m benchmarks.preference_accuracy RUN_FOLDER
...`` draws them. A run's name is that of its task.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from .curves import Picture, Points

IMAGE: Final = Path(__file__).parent.parent / "docs" / "images" / "preference-accuracy.svg"
METRIC: Final = "eval_rewards/accuracies"


def accuracies(folder: Path) -> tuple[str, Points]:
    """Return the task of a run, and the step and accuracy in % of each of its evaluations."""
    task = tomllib.loads((folder / "config.toml").read_text())["task"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return task, [(r["step"], 100 * r[METRIC]) for r in records if METRIC in r]


def svg(curves: Mapping[str, Points]) -> str:
    """Draw the accuracy of each task by step."""
    steps = sorted({step for points in curves.values() for step, _ in points})
    return Picture(
        title="held-out pairs whose chosen answer has the larger reward, %",
        axis="training steps",
        x_ticks=steps,
        y_ticks=(0, 50, 80, 100),
        least=0.0,
        most=100.0,
        linear=True,
    ).draw(curves)


if __name__ == "__main__":
    IMAGE.write_text(svg(dict(accuracies(Path(folder)) for folder in sys.argv[1:])))
