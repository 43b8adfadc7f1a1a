"""Ranks that do not hold the same plugins refuse to run together, and say which differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch.distributed as dist

from ascend_run.core.checkpoint import GroupRanks, SingleRank
from ascend_run.core.equal_plugins import require_equal_plugins
from ascend_run.plugin_api import PluginResolutionError
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import prepare, rank_environment

Lock = Mapping[str, Any]


def entry(version: str, digest: str = "a" * 64) -> Lock:
    return {"distribution": "ascend-run", "version": version, "sha256": digest}


SAME = {"cpu": entry("1.0"), "swap": entry("1.0")}


def refusal_on_rank(locks: Sequence[Lock]) -> tuple[str, tuple[str, ...]] | None:
    """Job: what this rank raises when it holds its own of the locks."""
    try:
        require_equal_plugins(locks[dist.get_rank()], GroupRanks())
    except PluginResolutionError as error:
        return error.headline, error.problems
    return None


def test_equal_plugins_pass(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(refusal_on_rank, 2, [SAME, dict(reversed(SAME.items()))]) == [None, None]
    require_equal_plugins(SAME, SingleRank())


@pytest.mark.parametrize(
    ("other", "problems"),
    [
        (
            {**SAME, "swap": entry("1.1")},
            ["'swap' is distribution ascend-run, sha256 aaaaaaaaaaaa, version 1.1"],
        ),
        (
            {**SAME, "swap": entry("1.0", "b" * 64)},
            ["'swap' is distribution ascend-run, sha256 bbbbbbbbbbbb, version 1.0"],
        ),
        ({"cpu": entry("1.0")}, ["'swap' is missing"]),
        (
            {**SAME, "extra": entry("3"), "cpu": entry("2")},
            [
                "'cpu' is distribution ascend-run, sha256 aaaaaaaaaaaa, version 2",
                "'extra' is distribution ascend-run, sha256 aaaaaaaaaaaa, version 3",
            ],
        ),
    ],
    ids=["version", "hash", "missing", "several"],
)
def test_a_rank_that_differs_is_shown_on_every_rank(
    gloo_pool: GlooPool, other: Lock, problems: list[str]
) -> None:
    refusals = gloo_pool.run(refusal_on_rank, 2, [SAME, other])
    assert refusals[0] is not None
    assert refusals[0] == refusals[1]
    headline, told = refusals[0]
    assert "the ranks do not run the same plugins" in headline
    assert [problem.partition(";")[0] for problem in told] == [
        f"rank 1: {problem}" for problem in problems
    ]
    assert all("; rank 0: " in problem for problem in told)


def test_what_only_other_ranks_have_is_missing_on_the_first(gloo_pool: GlooPool) -> None:
    refusals = gloo_pool.run(refusal_on_rank, 2, [{}, {"cpu": entry("1.0")}])
    assert refusals[0] is not None
    assert refusals[0][1][0].endswith("rank 0: missing")


def refusal_of_a_run(versions: Sequence[str]) -> str:
    """Job: what a run raises where ranks were installed apart."""
    from ascend_run.core.run import run_training

    with rank_environment() as size:
        prepared = prepare({**DENSE, "run.output_dir": "never-made"}, (), size)
        lock = {**prepared.lock, "pretrain": entry(versions[dist.get_rank()])}
        with pytest.raises(PluginResolutionError) as refused:
            run_training(attrs.evolve(prepared.run_request(), lock=lock))
        return str(refused.value)


def test_a_run_does_not_start_on_ranks_that_differ(gloo_pool: GlooPool) -> None:
    first, second = gloo_pool.run(refusal_of_a_run, 2, ["1.0", "1.1"], timeout=100)
    assert first == second
    assert "rank 1: 'pretrain' is distribution ascend-run" in first
    assert "version 1.1; rank 0: " in first
