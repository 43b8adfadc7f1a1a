"""Conversations under every context-parallel plugin: loss and gradients are those of one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Shard
from ascend_run.testing.tensors import FullTensors, assemble, differences
from scripts.long_sequence_table import KINDS, RANKS, plugins, refusal, values
from tests.support.needed_plugins import names_of
from tests.support.small_runs import standing_rank

Found = tuple[float, FullTensors]
CASES = {f"{plugin}, {kind}": (plugin, kind) for plugin in plugins() for kind in KINDS}


def gradients(config: Mapping[str, Any], enable: tuple[str, ...]) -> tuple[float, list[Shard]]:
    """Return the loss, and this rank's shards of every gradient. A job for the pool."""
    from ascend_run.testing.dry_run import DryRun, gradient_of

    with standing_rank(config, enable) as (hooks, context):
        dry_run = DryRun(hooks, context)
        step = dry_run.for_gradients(torch.float64)
        samples = dry_run.task_samples(config["train.global_batch_size"])
        totals = dry_run.gradients(step, dry_run.batches(samples))
        return totals.loss, [
            Shard(
                name=shard.name,
                tensor=None if shard.tensor is None else shard.tensor.clone(),
                offset=shard.offset,
                global_shape=shard.global_shape,
            )
            for shard in dry_run.shards(gradient_of)
        ]


@pytest.fixture(scope="module")
def of_one_rank(
    gloo_pool: GlooPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Found]:
    """Return loss and gradients of a kind of run without a plugin, which is run once."""

    @functools.cache
    def run(kind: str) -> Found:
        config = values(tmp_path_factory.mktemp("one"), "ulysses", kind)
        config = {**config, "parallel.context_parallel_size": 1}
        ((loss, shards),) = gloo_pool.run(gradients, 1, config, (), timeout=100)
        return loss, assemble([shards])

    return run


@pytest.mark.exhaustive(by=lambda case: [])
@pytest.mark.parametrize("case", names_of(CASES, lambda case: case[:1]))
def test_every_plugin_computes_what_one_rank_does_or_refuses(
    gloo_pool: GlooPool, of_one_rank: Callable[[str], Found], tmp_path: Path, case: str
) -> None:
    plugin, kind = CASES[case]
    if (why := refusal(plugin, kind)) is not None:
        assert "cannot be split over parallel.context_parallel_size" in why
        assert kind == "packed, 97 tokens"
        return
    config, ranks = values(tmp_path, plugin, kind), RANKS.get(plugin, 2)
    ended = gloo_pool.run(gradients, ranks, config, (plugin,), timeout=100)
    want_loss, want = of_one_rank(kind)
    assert [loss for loss, _ in ended] == pytest.approx([want_loss] * ranks, rel=1e-10)
    got = assemble([shards for _, shards in ended])
    assert got.problems(1e-10) == want.problems() == []
    assert all(tensor.any() for tensor in want.tensors.values())
    assert list(differences(got.tensors, want.tensors, 1e-10)) == []
