"""Events reach every listener, in their order, with what stands at that moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import Manifest, RunContext, hookimpl
from ascend_run.testing.pool import GlooPool
from tests.support.probed_runs import probe, train
from tests.support.tokens import write_tokens

from .jobs import log_lines_heard


@attrs.frozen
class Told:
    """One event as one listener heard it."""

    listener: str
    event: str
    step: int
    details: dict[str, Any]


class AllEars:
    """A plugin that listens to everything."""

    def __init__(self, name: str, told: list[Told]) -> None:
        self.manifest = Manifest(name=name, summary="listens to everything")
        self.told = told

    def hear(self, event: str, context: RunContext, **details: Any) -> None:
        self.told.append(Told(self.manifest.name, event, context.step, details))

    @hookimpl
    def ascend_before_run(self, context: RunContext) -> None:
        self.hear("ascend_before_run", context)

    @hookimpl
    def ascend_before_step(self, context: RunContext) -> None:
        self.hear("ascend_before_step", context)

    @hookimpl
    def ascend_after_step(self, context: RunContext) -> None:
        self.hear("ascend_after_step", context)

    @hookimpl
    def ascend_after_log(self, context: RunContext, metrics: Mapping[str, float]) -> None:
        self.hear("ascend_after_log", context, metrics=metrics)

    @hookimpl
    def ascend_before_evaluation(self, context: RunContext) -> None:
        self.hear("ascend_before_evaluation", context)

    @hookimpl
    def ascend_after_evaluation(self, context: RunContext, loss: float) -> None:
        self.hear("ascend_after_evaluation", context, loss=loss)

    @hookimpl
    def ascend_after_checkpoint(self, context: RunContext, path: str) -> None:
        self.hear("ascend_after_checkpoint", context, path=path)

    @hookimpl
    def ascend_after_run(self, context: RunContext) -> None:
        self.hear("ascend_after_run", context)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """Of a run of two steps with evaluations and checkpoints, by two listeners."""
    folder = tmp_path_factory.mktemp("events")
    heard: list[Told] = []
    values = {
        "train.train_iters": 2,
        "train.eval_interval": 1,
        "train.eval_iters": 1,
        "data.validation": [str(folder / "tokens")],
        "checkpoint.save_interval": 2,
    }
    train(folder, AllEars("first", heard), AllEars("second", heard), values=values)
    return heard


def heard(told: list[Told], event: str) -> list[Told]:
    """What the first listener heard; the second has heard the same just after it."""
    places = [i for i, one in enumerate(told) if (one.listener, one.event) == ("first", event)]
    for place in places:
        assert told[place + 1] == attrs.evolve(told[place], listener="second")
    return [told[place] for place in places]


def test_events_come_in_the_order_of_a_run(told: list[Told]) -> None:
    evaluation = ["ascend_before_evaluation", "ascend_after_evaluation"]
    step = ["ascend_before_step", "ascend_after_step", "ascend_after_log", *evaluation]
    assert [one.event for one in told if one.listener == "first"] == [
        "ascend_before_run",
        *evaluation,
        *step,
        *step,
        "ascend_after_checkpoint",
        "ascend_after_run",
    ]


def test_ascend_before_run_comes_once_before_the_first_step(told: list[Told]) -> None:
    assert [one.step for one in heard(told, "ascend_before_run")] == [0]


def test_ascend_before_run_finds_everything_built(tmp_path: Path) -> None:
    found: list[tuple[bool, list[str]]] = []

    def look(self: Any, context: Any) -> None:
        found.append((context.models["policy"].trains, [*context.models]))

    train(tmp_path, probe("ascend_before_run", look))
    assert found == [(True, ["policy"])]


def test_ascend_before_step_counts_the_steps_that_are_done(told: list[Told]) -> None:
    assert [one.step for one in heard(told, "ascend_before_step")] == [0, 1]


def test_ascend_after_step_counts_its_own_step(told: list[Told]) -> None:
    assert [one.step for one in heard(told, "ascend_after_step")] == [1, 2]


def test_ascend_after_log_is_given_the_line_that_was_written(told: list[Told]) -> None:
    lines = heard(told, "ascend_after_log")
    assert [line.details["metrics"]["step"] for line in lines] == [1, 2]
    assert all(line.details["metrics"]["loss"] > 0 for line in lines)


def test_ascend_after_log_comes_on_every_rank(tmp_path: Path, gloo_pool: GlooPool) -> None:
    write_tokens(tmp_path)
    first, second = gloo_pool.run(log_lines_heard, 2, str(tmp_path), timeout=100)
    assert first == second
    assert [step for step, _ in first] == [1, 2]


def test_ascend_before_evaluation_comes_at_the_start_and_when_due(told: list[Told]) -> None:
    assert [one.step for one in heard(told, "ascend_before_evaluation")] == [0, 1, 2]


def test_ascend_after_evaluation_is_given_the_loss_on_held_out_data(told: list[Told]) -> None:
    losses = [one.details["loss"] for one in heard(told, "ascend_after_evaluation")]
    assert len({*losses}) == 3
    assert all(3 < loss < 6 for loss in losses)  # ln 90 is 4.5


def test_ascend_after_checkpoint_is_given_where_it_was_published(told: list[Told]) -> None:
    (published,) = heard(told, "ascend_after_checkpoint")
    assert published.step == 2
    assert (Path(published.details["path"]) / "manifest.json").is_file()


def test_ascend_after_run_comes_once_at_the_end(told: list[Told]) -> None:
    assert [one.step for one in heard(told, "ascend_after_run")] == [2]


def test_ascend_after_run_is_called_for_a_failed_run(tmp_path: Path) -> None:
    told: list[Told] = []
    planted = RuntimeError("planted")

    def fail(self: Any, context: Any) -> None:
        if context.step == 1:
            raise planted

    with pytest.raises(RuntimeError, match="planted"):
        train(
            tmp_path,
            AllEars("first", told),
            probe("ascend_after_step", fail, "failing"),
            values={"train.train_iters": 3},
        )
    assert [(one.event, one.step) for one in told[-2:]] == [
        ("ascend_after_step", 1),
        ("ascend_after_run", 1),
    ]


def test_no_evaluation_is_made_where_none_is_asked_for(tmp_path: Path) -> None:
    told: list[Told] = []
    values = {"data.validation": [str(tmp_path / "tokens")], "train.eval_interval": 0}
    train(tmp_path, AllEars("first", told), values=values)
    assert "ascend_after_run" in {one.event for one in told}
    assert not [one for one in told if "evaluation" in one.event]
