"""The first step of a task on a tiny model in float64: loss, metrics and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from ascend_run.core.train.totals import LossTotals

from .family_tasks import task_values
from .loaded_model import largest_difference
from .small_runs import Values, standing_rank

VOCABULARY: Final = 401
"""Of the tokenizer, and more."""
Sample = Mapping[str, Tensor]
Change = Callable[[int, Sample], Sample]
"""From the index of a sample and the sample to another one."""
Step = tuple[LossTotals, dict[str, Tensor]]
Steps = Callable[[Change | None], Step]
"""Returns the results of a step on samples that are changed before."""


def step_values(task: str, folder: Path, *, packing: bool) -> dict[str, Any]:
    """Return config values of a step on all samples of ``write_samples``."""
    return {
        **task_values(task, folder, packing=packing),
        "model.num_layers": 2,
        "model.hidden_size": 32,
        "model.num_attention_heads": 4,
        "model.vocab_size": VOCABULARY,
        "data.seq_length": 128,
    }


class _Changed:
    def __init__(self, samples: Any, change: Change) -> None:
        self.samples, self.change = samples, change

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.change(index, self.samples[index])


@contextmanager
def steps_of(values: Values, enable: Sequence[str] = ()) -> Iterator[Steps]:
    """Build a model in float64, and return its first step on samples that may be changed."""
    from ascend_run.testing.dry_run import DryRun, gradient_of

    with standing_rank(values, enable) as (hooks, context):
        dry_run = DryRun(hooks, context)
        forward_backward = dry_run.for_gradients(torch.float64)
        dry_run.load_weights()
        samples = dry_run.task_samples(context.config.train.global_batch_size)
        assert samples is not None

        def step(change: Change | None = None) -> Step:
            for chunk in dry_run.bundle.chunks:
                chunk.zero_grad_buffer()
            given = samples if change is None else _Changed(samples, change)
            totals = dry_run.gradients(forward_backward, dry_run.batches(given, first=0))
            shards = dry_run.shards(gradient_of)
            return totals, {x.name: x.tensor.clone() for x in shards if x.tensor is not None}

        yield step


def assert_near_step(found: Step, wanted: Step, tolerance: float = 1e-12) -> None:
    """Compare relative to the largest element of each gradient."""
    assert found[0].metrics == pytest.approx(wanted[0].metrics, rel=tolerance, abs=tolerance)
    assert found[0].loss == pytest.approx(wanted[0].loss, rel=tolerance)
    assert found[0].count == wanted[0].count
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert largest_difference(found[1][name], gradient) < tolerance, name


def assert_same_step(found: Step, wanted: Step) -> None:
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert torch.equal(found[1][name], gradient), name
