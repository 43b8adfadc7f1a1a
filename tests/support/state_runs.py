"""Settings of runs whose optimizer states are elsewhere, and their comparison with runs without."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ascend_run.testing.pool import GlooPool
from ascend_run.testing.tensors import full_tensors
from tests.support.stepping_jobs import continued, saved

Values: TypeAlias = Mapping[str, Any]
Tensors: TypeAlias = Mapping[str, Tensor]
Start: TypeAlias = tuple[tuple[str, ...], Values, int]
"""Plugins, further config and number of ranks of a run."""

FP32: Final[Values] = {
    "train.micro_batch_size": 2,
    "model.num_layers": 3,  # two ranges of an even number would end between parameters
    "optimizer.lr": 0.01,
    "optimizer.lr_decay_style": "constant",
    "optimizer.weight_decay": 0.5,
}
BF16: Final[Values] = {**FP32, "train.precision": "bf16"}
DISTRIBUTED: Final = {"ddp.use_distributed_optimizer": True}
OVERLAPPED: Final = {
    **DISTRIBUTED,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "ddp.bucket_size": 4000,
}
TP: Final = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
EP: Final = {"parallel.expert_model_parallel_size": 2}
STEPS: Final = 20
SKIPPED: Final = (1, 2, 7, 13)


def fingerprints(folder: Path) -> list[str]:
    """Return the hash of all parameters after each step of the run in a folder."""
    lines = map(json.loads, (folder / "fingerprint.jsonl").read_text().splitlines())
    return [line["parameters"] for line in lines if "parameters" in line]


def without_and_with(
    pool: GlooPool,
    job: Callable[..., Any],
    ranks: int,
    values: Values,
    own: tuple[tuple[str, ...], Values],
    *arguments: Any,
    beside: tuple[str, ...] = (),
) -> tuple[list[Any], list[Any]]:
    """Return what the ranks of a job return: without a plugin, and with it.

    Args:
        job: Takes config, plugins and the arguments.
        own: The plugin, and its options.
        beside: Plugins of both runs.
    """
    (names, options), call = own, (job, ranks)
    plain = pool.run(*call, values, beside, *arguments, timeout=200)
    ours = pool.run(*call, {**values, **options}, (*beside, *names), *arguments, timeout=200)
    return plain, ours


def assert_equal(got: Tensors, want: Tensors) -> None:
    """No bit differs."""
    assert got.keys() == want.keys()
    assert [key for key, tensor in want.items() if not torch.equal(got[key], tensor)] == []


def compared_checkpoints(
    pool: GlooPool,
    folder: Path,
    values: Values,
    begun: Start,
    resumed: Start,
    around: Callable[..., Any] | None = None,
) -> tuple[Tensors, Tensors]:
    """Save, load into another number of ranks and take more steps, with a plugin and without any:
    all bitwise equal.

    Args:
        values: Options of the plugin are left out where it is not enabled.
        around: Runs each job, which it takes before the job's arguments.

    Returns:
        What the checkpoint has, and after the further steps.
    """
    steps = 3

    def full(outcomes: Any) -> Tensors:
        found = full_tensors(outcomes)
        assert found.problems() == []
        return found.tensors

    def run(job: Any, enable: tuple[str, ...], more: Values, ranks: int, to: Path) -> Any:
        given = {k: v for k, v in values.items() if enable or not k.startswith("plugins.")}
        call = (job, ranks) if around is None else (around, ranks, job)
        return pool.run(*call, {**given, **more}, enable, str(to), steps)

    ends = []
    for name, names in (("ours", (begun[0], resumed[0])), ("plain", ((), ()))):
        written = full(run(saved, names[0], *begun[1:], folder / name))
        ranks = run(continued, names[1], *resumed[1:], folder / name)
        before, after = (full([rank[at] for rank in ranks]) for at in range(2))
        assert_equal(before, written)
        ends.append((written, after))
    (ours, ours_after), (plain, plain_after) = ends
    assert_equal(ours, plain)
    assert_equal(ours_after, plain_after)
    return plain, plain_after
