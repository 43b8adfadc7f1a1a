"""On ranks: the feature with a wrong gradient is found, and where it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.testing.offering import offered
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.bisect.bisection import Bisection, bisect
from ascend_run.tools.bisect.comparing import Comparer
from ascend_run.tools.bisect.journal import Journal
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.ranks import PoolRanks
from tests.tools.bisect.made_up import HARMLESS, DoublesAGradient, DoublesIfMarked, Marks


def searched(pool: GlooPool, folder: Path, *plugins: type[Any]) -> Bisection:
    names = tuple(plugin.manifest.name for plugin in plugins)
    with offered(*plugins):
        compare = Comparer(Question(enable=names, layout={}, steps=2), PoolRanks(pool))
        return bisect(compare, Journal(folder, compare.identity()), lambda number, enabled: None)


@pytest.mark.exhaustive(by=lambda plugins: [])
@pytest.mark.parametrize(
    ("plugins", "culprits"),
    [
        ((*HARMLESS[:4], DoublesAGradient, *HARMLESS[4:]), {"doubles-a-gradient"}),
        ((Marks, HARMLESS[0], DoublesIfMarked), {"marks", "doubles-if-marked"}),
    ],
    ids=["one of eight", "two together"],
)
def test_the_features_with_a_wrong_gradient_are_found(
    gloo_pool: GlooPool, tmp_path: Path, plugins: tuple[type[Any], ...], culprits: set[str]
) -> None:
    result = searched(gloo_pool, tmp_path, *plugins)
    assert result.culprits is not None
    assert {*result.culprits} == culprits
    assert result.last.where == "decoder.layers.1.mlp.linear_fc2 (backward)"
    assert result.last.step == 1
    assert len(result.tried) <= 3 + 3


@pytest.mark.needs_plugins("ulysses")
def test_a_feature_that_the_layout_needs_is_always_enabled(gloo_pool: GlooPool) -> None:
    with offered(*HARMLESS[:2]):
        question = Question(enable=("harmless-0", "ulysses", "harmless-1"), layout={"cp": 2})
        compare = Comparer(question, PoolRanks(gloo_pool))
    assert compare.kept == ("ulysses",)
    assert {choice.name for choice in compare.choices} == {"harmless-0", "harmless-1"}
    assert {*compare.with_needed(["harmless-1"])} == {"harmless-1", "ulysses"}


def test_an_unknown_feature_is_the_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bisect", "--enable", "no-such-feature"]) == 2
    assert "no-such-feature" in capsys.readouterr().err
