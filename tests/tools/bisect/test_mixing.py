"""What two runs differ in, and runs between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascend_run.testing.offering import offered
from ascend_run.tools.bisect.choices import ENABLED, NOT_ENABLED, Choice, Kind
from ascend_run.tools.bisect.recorded_runs import not_searched, read_runs

from .made_up import Harmless0, Harmless1, HasAnOption, Rounds
from .two_runs import mixing_of, write_run


@pytest.fixture(autouse=True)
def plugins() -> Iterator[None]:
    with offered(Harmless0, Harmless1, Rounds, HasAnOption):
        yield


def test_plugins_settings_seed_and_axes_are_the_choices(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", {"run.seed": 1, "optimizer.adam_eps": 1e-8}, ["harmless-0"])
    values = {"run.seed": 2, "parallel.tensor_model_parallel_size": 2}
    other = write_run(tmp_path / "b", values, ["harmless-1"], world_size=2)
    choices = {choice.name: choice for choice in mixing_of(one, other).choices}
    assert {*choices} == {
        "harmless-0",
        "harmless-1",
        "run.seed",
        "optimizer.adam_eps",
        "tp",
        "ranks",
    }
    assert choices["harmless-1"].values == (NOT_ENABLED, ENABLED)
    assert choices["optimizer.adam_eps"] == Choice(
        kind=Kind.SETTING, name="optimizer.adam_eps", values=("1e-08", "0.001")
    )
    assert choices["tp"].kind is Kind.LAYOUT


def test_a_mixed_run_takes_only_the_chosen_values(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", {"run.seed": 1, "optimizer.weight_decay": 0.25})
    other = write_run(
        tmp_path / "b", {"run.seed": 2, "optimizer.weight_decay": 0.5}, ["harmless-1"]
    )
    mixing = mixing_of(one, other)
    seen = [
        (config.run.seed, config.optimizer.weight_decay, config.enable)
        for names in ([], ["run.seed"], ["harmless-1", "optimizer.weight_decay"])
        for config in [mixing.side(names).prepare().config]
    ]
    assert seen == [(1, 0.25, ()), (2, 0.25, ()), (1, 0.5, ("harmless-1",))]


def test_a_setting_of_the_probes_that_differs_is_kept(tmp_path: Path) -> None:
    """``verify`` sets Adam's epsilon, with which it would be no difference."""
    one = write_run(tmp_path / "a", {"optimizer.adam_eps": 1e-8, "optimizer.lr": 0.5})
    other = write_run(tmp_path / "b", {"optimizer.adam_eps": 1e-7, "optimizer.lr": 0.5})
    mixing = mixing_of(one, other)
    for names, epsilon in (([], 1e-8), (["optimizer.adam_eps"], 1e-7)):
        optimizer = mixing.side(names).prepare().config.optimizer
        assert (optimizer.adam_eps, optimizer.lr) == (epsilon, 1e-3)


def test_what_cannot_run_alone_is_taken_together(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a")
    values = {
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "optimizer.weight_decay": 0.5,
    }
    other = write_run(tmp_path / "b", values, world_size=2)
    mixing = mixing_of(one, other)
    assert {*mixing.with_needed(["sp"])} == {"sp", "tp", "ranks"}
    assert {*mixing.with_needed(["tp"])} == {"tp", "ranks"}
    assert mixing.with_needed(["optimizer.weight_decay"]) == ("optimizer.weight_decay",)
    order = [choice.name for choice in mixing.choices]
    assert order.index("ranks") < order.index("tp") < order.index("sp")
    assert mixing.side(["tp", "ranks"]).world_size == 2


def test_options_of_a_plugin_of_one_run_come_with_it(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", {"plugins.has-an-option.level": 1}, ["has-an-option"])
    mixing = mixing_of(one, write_run(tmp_path / "b"))
    assert [choice.name for choice in mixing.choices] == ["has-an-option"]
    options = mixing.side([]).prepare().config.plugins["has-an-option"]
    assert options.level == 1
    assert mixing.side(["has-an-option"]).prepare().config.enable == ()
    back = mixing_of(tmp_path / "b", one)
    assert back.side(["has-an-option"]).prepare().config.plugins["has-an-option"] == options


def test_an_option_that_differs_in_both_is_a_choice(tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2)):
        write_run(tmp_path / name, {"plugins.has-an-option.level": number}, ["has-an-option"])
    (choice,) = mixing_of(tmp_path / "a", tmp_path / "b").choices
    assert (choice.kind, choice.name) == (Kind.SETTING, "plugins.has-an-option.level")


@pytest.mark.parametrize(
    ("values", "enable", "tolerant"),
    [
        ({"run.seed": 2}, [], ()),
        ({"run.seed": 2}, ["rounds"], ("rounds",)),
    ],
    ids=["settings", "rounding plugin"],
)
def test_only_declared_rounding_allows_a_tolerance(
    tmp_path: Path, values: dict[str, object], enable: list[str], tolerant: tuple[str, ...]
) -> None:
    one, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", values, enable)
    assert mixing_of(one, other).tolerant == tolerant


def test_settings_of_checkpoints_are_no_choice_and_are_noted(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", {"run.output_dir": "x"})
    other = write_run(tmp_path / "b", {"checkpoint.save_interval": 3, "run.output_dir": "y"})
    mixing = mixing_of(one, other)
    assert mixing.choices == ()
    (note,) = mixing.notes
    assert note.endswith(": checkpoint.save_interval")


def test_other_code_and_versions_are_noted(tmp_path: Path) -> None:
    for name, version in (("a", "1.0"), ("b", "1.1")):
        folder = write_run(tmp_path / name, {"run.seed": ord(name)}, ["harmless-0"])
        about = {"format": 1, "versions": {"nccl": version}}
        (folder / "environment.json").write_text(json.dumps(about))
    lock = tmp_path / "b" / "plugins.lock.json"
    changed = json.loads(lock.read_text())
    changed["harmless-0"]["sha256"] = 64 * "0"
    lock.write_text(json.dumps(changed))
    (note,) = mixing_of(tmp_path / "a", tmp_path / "b").notes
    assert note.endswith("is not that of run B: harmless-0")
    (note,) = not_searched(*read_runs((tmp_path / "a", tmp_path / "b")))
    assert note.endswith(": version nccl: 1.0 in A, 1.1 in B")
