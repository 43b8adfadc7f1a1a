"""The chart of preference accuracy: the evaluations of each run, on linear axes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.preference_accuracy import accuracies, svg

NAMESPACE = {"s": "http://www.w3.org/2000/svg"}


def test_accuracies_are_those_of_the_evaluations(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('task = "simpo"\n')
    lines = [
        {"step": 0, "eval_loss": 1.0, "eval_rewards/accuracies": 0.5},
        {"step": 1, "rewards/accuracies": 0.1},
        {"step": 20, "eval_rewards/accuracies": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert accuracies(tmp_path) == ("simpo", [(0, 50.0), (20, 75.0)])


def test_curves_are_linear_from_0_to_100_percent() -> None:
    root = ElementTree.fromstring(svg({"dpo": [(0, 0.0), (10, 50.0), (20, 100.0)]}))
    (line,) = root.findall("s:polyline", NAMESPACE)
    points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    (left, low), (middle, half), (right, high) = points
    assert left < middle < right
    assert low > half > high
    assert (middle - left, low - half) == (right - middle, half - high)
    assert "dpo" in "".join(root.itertext())
