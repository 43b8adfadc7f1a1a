"""The charts of preference accuracy: the evaluations of each run, on linear axes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import preference_accuracy
from benchmarks.preference_accuracy import CHARTS, IMAGES, PROMISED, accuracies, pictures, recorded

NAMESPACE = {"s": "http://www.w3.org/2000/svg"}
PAGES = Path(__file__).parents[2] / "docs/plugins/tasks"


def run_folder(parent: Path, name: str, *shares: float) -> Path:
    """Write the metrics of a run that was evaluated every 20 steps."""
    lines: list[dict[str, float]] = [{"step": 1, "rewards/accuracies": 0.1}]
    for index, share in enumerate(shares):
        lines.append({"step": 20 * index, "eval_loss": 1.0, "eval_rewards/accuracies": share})
    (parent / name).mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (parent / name / "metrics.jsonl").write_text(text)
    return parent / name


def test_accuracies_are_those_of_the_evaluations(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "simpo", 0.5, 0.75)
    assert accuracies(folder) == ("simpo", [(0, 50.0), (20, 75.0)])


def test_curves_are_linear_from_0_to_100_percent() -> None:
    drawn = preference_accuracy.svg({"dpo": [(0, 0.0), (10, 50.0), (20, 100.0)]})
    root = ElementTree.fromstring(drawn)
    (line,) = root.findall("s:polyline", NAMESPACE)
    points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    (left, low), (middle, half), (right, high) = points
    assert left < middle < right
    assert low > half > high
    assert (middle - left, low - half) == (right - middle, half - high)
    assert "dpo" in "".join(root.itertext())


def test_a_run_replaces_its_curve_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preference_accuracy, "RESULT", tmp_path / "curves.json")
    monkeypatch.setattr(preference_accuracy, "IMAGES", tmp_path)
    first, later = tmp_path / "first", tmp_path / "later"
    first.mkdir()
    later.mkdir()

    preference_accuracy.main(
        [run_folder(first, "dpo", 0.0, 0.9), run_folder(first, "orm", 0.5, 0.9)]
    )
    preference_accuracy.main([run_folder(later, "dpo", 0.0, 0.95)])

    assert recorded() == {"dpo": [[0, 0.0], [20, 95.0]], "orm": [[0, 50.0], [20, 90.0]]}
    assert {path.name for path in tmp_path.glob("*.svg")} == {*CHARTS}


def test_the_pictures_show_what_is_recorded() -> None:
    drawn = pictures(recorded())
    assert drawn.keys() == CHARTS.keys()
    for image, text in drawn.items():
        assert (IMAGES / image).read_text() == text


def test_recorded_runs_end_with_what_is_promised() -> None:
    curves = recorded()
    assert curves.keys() == {run for runs in CHARTS.values() for run in runs}
    for run, least in PROMISED.items():
        (_, begins), *_, (_, ends) = curves[run]
        assert begins <= 60
        assert ends >= least


@pytest.mark.parametrize(
    ("page", "runs"), [("dpo.md", CHARTS["preference-accuracy.svg"]), ("orm.md", ("orm",))]
)
def test_tables_of_the_pages_are_what_is_recorded(page: str, runs: tuple[str, ...]) -> None:
    lines = (PAGES / page).read_text().splitlines()
    for run in runs:
        steps, shares = zip(*recorded()[run], strict=True)
        assert f"| step | {' | '.join(map(str, steps))} |" in lines
        assert f"| `{run}` | {' | '.join(f'{share:.1f}' for share in shares)} |" in lines
