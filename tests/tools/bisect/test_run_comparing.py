"""On ranks: what makes two runs part is found, and where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api.errors import ConfigError
from ascend_run.testing.offering import offered
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.bisect.bisection import Bisection, bisect
from ascend_run.tools.bisect.journal import Journal
from ascend_run.tools.bisect.run_comparing import RunComparer
from ascend_run.tools.verify.ranks import PoolRanks

from .made_up import HARMLESS, DoublesAGradient
from .two_runs import Values, mixing_of, write_run, write_tokens


def searched(
    pool: GlooPool, folder: Path, values: Values, plugins: Sequence[type[Any]] = ()
) -> Bisection:
    """Search what makes a run with these values and plugins part from one without."""
    data = {"data.train": [write_tokens(folder)], "data.cache_dir": str(folder / "cache")}
    with offered(*plugins):
        one = write_run(folder / "a", data)
        names = [plugin.manifest.name for plugin in plugins]
        mixing = mixing_of(one, write_run(folder / "b", {**data, **values}, names))
        compare = RunComparer(mixing, PoolRanks(pool))
        return bisect(compare, Journal(folder, compare.identity()), lambda number, changes: None)


def test_a_plugin_with_a_wrong_gradient_is_found_between_runs(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    plugins = (HARMLESS[0], DoublesAGradient, HARMLESS[1])
    result = searched(gloo_pool, tmp_path, {"optimizer.hysteresis": 3}, plugins)
    assert result.culprits == ("doubles-a-gradient",)
    assert result.last.where == "decoder.layers.1.mlp.linear_fc2 (backward)"
    assert result.last.step == 1


def test_a_setting_of_the_optimizer_is_found_between_runs(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    values = {"optimizer.adam_eps": 2e-3, "optimizer.hysteresis": 3}
    result = searched(gloo_pool, tmp_path, values)
    assert result.culprits == ("optimizer.adam_eps",)
    assert "optimizer" in result.last.where
    assert result.last.step == 2


def test_runs_with_other_parameters_are_refused(gloo_pool: GlooPool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights cannot be compared") as refused:
        searched(gloo_pool, tmp_path, {"model.ffn_hidden_size": 64})
    assert "in A, " in refused.value.problems[0]
    assert "model.ffn_hidden_size" in refused.value.problems[-1]
