"""The curves of held-out preference accuracy in the pages of the tasks dpo, simpo and orm.

``bash examples/dpo.sh`` and ``bash examples/orm.sh`` make the runs. ``python -m
benchmarks.preference_accuracy RUN_FOLDER ...`` writes their evaluations into
``benchmarks/results/preference_accuracy.json``, beside those of other runs, and draws all of them.
A run's name is that of its folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from .curves import Picture, Points

RESULT: Final = Path(__file__).parent / "results" / "preference_accuracy.json"
IMAGES: Final = Path(__file__).parent.parent / "docs" / "images"
CHARTS: Final[Mapping[str, Sequence[str]]] = {
    "preference-accuracy.svg": ("dpo", "simpo", "chosen-only"),
    "reward-accuracy.svg": ("orm",),
}
"""Picture -> the runs that it shows."""
PROMISED: Final = {"dpo": 80, "simpo": 80, "orm": 85}
"""Run -> accuracy that it ends with at least, in %; the others are controls."""
METRIC: Final = "eval_rewards/accuracies"

Curves = Mapping[str, Points]
"""Run -> step and accuracy in % of each of its evaluations."""


def accuracies(folder: Path) -> tuple[str, Points]:
    """Return the name of a run, and the step and accuracy in % of each of its evaluations."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    points = [(r["step"], round(100 * r[METRIC], 2)) for r in records if METRIC in r]
    return folder.resolve().name, points


def recorded() -> Curves:
    """Return the curves of the last runs."""
    curves: Curves = json.loads(RESULT.read_text())
    return curves


def svg(curves: Curves) -> str:
    """Draw the accuracy of each run by step."""
    steps = sorted({step for points in curves.values() for step, _ in points})
    return Picture(
        title="held-out pairs whose chosen answer has the larger reward, %",
        axis="training steps",
        x_ticks=steps,
        y_ticks=(0, 50, *sorted({PROMISED[run] for run in curves if run in PROMISED}), 100),
        least=0.0,
        most=100.0,
        linear=True,
    ).draw(curves)


def pictures(curves: Curves) -> Mapping[str, str]:
    """Return the charts, by the names of their files."""
    return {
        image: svg({run: curves[run] for run in runs if run in curves})
        for image, runs in CHARTS.items()
        if not curves.keys().isdisjoint(runs)
    }


def main(folders: Sequence[Path]) -> None:
    """Record runs, and draw what is recorded."""
    before = recorded() if RESULT.exists() else {}
    curves = {**before, **dict(map(accuracies, folders))}
    RESULT.write_text(json.dumps(curves, indent=1) + "\n")
    for image, drawn in pictures(curves).items():
        (IMAGES / image).write_text(drawn)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
