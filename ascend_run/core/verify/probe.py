"""One rank's part in a probe: the run as training makes it, up to gradients and then some steps."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from ascend_run.core.launch.rank import ATTEMPT_VARIABLE
from ascend_run.core.run import RunRequest, prepared_rank, seed_everything
from ascend_run.core.train.data_parallel import gather_parameters
from ascend_run.core.train.rehearsal import Rehearsal, gradient_of
from ascend_run.core.train.step import ForwardBackward, StepResult
from ascend_run.plugin_api import contracts as c

from .copies import stale_parameters
from .declared import Declared
from .record import Place, Record
from .taps import tapped

HALF: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""``train.precision`` -> dtype of the parameters."""
MakeDataset = Callable[[Rehearsal, int], Any]
"""(rehearsal, how many samples) -> the run's training samples."""


def run_probes(
    make_request: Callable[[], RunRequest], make_dataset: MakeDataset, steps: int
) -> Record:
    """Gradients in float64, the same once more with every module watched, and steps in float32; of
    a run in half precision, gradients and steps in that.

    Each is a run of its own from the same seed, with new instances of the plugins: what is watched
    may run otherwise (a compiled layer does), so nothing else is read from it.

    Args:
        make_request: Called once for each.
    """
    record: Record | None = None
    in_half = make_request().config.train.precision in HALF
    for part in (_gradients, _train) if in_half else (_gradients, _watched, _train):
        with _meeting_elsewhere(part.__name__), prepared_rank(make_request()) as (hooks, context):
            seed_everything(context.config, context.layout)
            if record is None:
                record = _empty_record(context)
            rehearsal = Rehearsal(hooks, context)
            part(rehearsal, make_dataset, record, steps)
    assert record is not None
    return record


@contextmanager
def _meeting_elsewhere(part: str) -> Iterator[None]:
    """Let ranks that make their groups again look for one another under another key: at the first
    one they would find addresses that are closed."""
    before = os.environ.get(ATTEMPT_VARIABLE)
    os.environ[ATTEMPT_VARIABLE] = f"{before or 0}{part}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ATTEMPT_VARIABLE]
        else:
            os.environ[ATTEMPT_VARIABLE] = before


def _empty_record(context: c.RunContext) -> Record:
    layout = context.layout
    axes = ("tp", "pp", "cp", "dp", "ep", "expt_tp")
    return Record(
        rank=layout.rank,
        coordinates={axis: layout.coordinate(axis) for axis in axes},
        sizes={axis: getattr(layout, axis) for axis in axes},
    )


def _gradients(rehearsal: Rehearsal, make_dataset: MakeDataset, record: Record, steps: int) -> None:
    precision = rehearsal.context.config.train.precision
    forward_backward = rehearsal.for_gradients(HALF.get(precision, torch.float64))
    initial = rehearsal.pieces(Tensor.detach)
    declared = Declared(rehearsal.hooks, rehearsal.context)
    record.places = [
        Place(
            name=p.name,
            offset=p.offset,
            global_shape=p.global_shape,
            trains=p.trains,
            should_train=declared.trains(p),
        )
        for p in initial
    ]
    record.initial = [_kept(p.tensor) for p in initial]
    counted = _count_forwards(rehearsal)
    record.loss, record.num_tokens, taken = _one_batch(rehearsal, forward_backward, make_dataset)
    # A schedule of its own may call a model's parts; what it took from the data counts then.
    record.micro_batches = counted() or taken
    found = rehearsal.pieces(gradient_of)
    record.gradients = [None if p.tensor is None else _kept(p.tensor) for p in found]


def _watched(rehearsal: Rehearsal, make_dataset: MakeDataset, record: Record, steps: int) -> None:
    forward_backward = rehearsal.for_gradients(torch.float64)
    layout = rehearsal.context.layout
    dp = (layout.coordinate("dp"), layout.dp)
    with (
        torch.compiler.set_stance("force_eager"),  # hooks are not for graphs
        tapped(rehearsal.bundle, rehearsal.context.groups, dp, record),
    ):
        _one_batch(rehearsal, forward_backward, make_dataset)


def _train(rehearsal: Rehearsal, make_dataset: MakeDataset, record: Record, steps: int) -> None:
    rehearsal.build()
    step, config = rehearsal.train_step(), rehearsal.context.config
    peaks = _watch_peaks(rehearsal)
    batches = rehearsal.batches(make_dataset(rehearsal, steps * config.train.global_batch_size))
    results: list[StepResult] = []
    weights = []
    gathers_late = bool(config.ddp.overlap_param_gather)
    for index in range(steps):
        results.append(rehearsal.step(step, batches))
        if gathers_late and index < steps - 1:
            continue  # as in training, nobody but the next forward asks for them
        gather_parameters(rehearsal.bundle)
        weights.append([_kept(p.tensor) for p in rehearsal.pieces(Tensor.detach)])
    record.weights = weights
    record.losses = [result.loss for result in results]
    record.grad_norms = [
        float("nan") if result.grad_norm is None else result.grad_norm for result in results
    ]
    record.step_tokens = [result.num_tokens for result in results]
    record.peaks = peaks()
    record.stale = stale_parameters(rehearsal.bundle, config.model.vocab_size)
    record.generators = generator_fingerprints()


def _one_batch(
    rehearsal: Rehearsal, forward_backward: ForwardBackward, make_dataset: MakeDataset
) -> tuple[float, int, int]:
    """Loss, tokens, and how many micro-batches were taken from the data."""
    samples = rehearsal.context.config.train.global_batch_size
    batches, taken = rehearsal.batches(make_dataset(rehearsal, samples)), 0

    def counted() -> Iterator[c.Batch]:
        nonlocal taken
        for batch in batches:
            taken += 1
            yield batch

    loss, num_tokens = rehearsal.gradients(forward_backward, counted())
    return loss, num_tokens, taken


def _kept(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().cpu().clone()


def _count_forwards(rehearsal: Rehearsal) -> Callable[[], int]:
    """Micro-batches that the first chunk runs from here on."""
    count = 0

    def note(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = rehearsal.bundle.chunks[0].register_forward_pre_hook(note)

    def stop() -> int:
        handle.remove()
        return count

    return stop


def _watch_peaks(rehearsal: Rehearsal) -> Callable[[], list[float]]:
    """The largest gradient of each place, read where the optimizer is about to take it."""
    optimizer, most = rehearsal.bundle.optimizer, rehearsal.context.config.optimizer.clip_grad
    inner = optimizer.step
    largest: list[float] = []

    def step() -> Any:
        sizes = [_size(p.tensor) for p in rehearsal.pieces(gradient_of)]
        updated, norm, more = inner()
        clipped = min(1.0, most / (norm + 1e-6)) if most > 0 and norm is not None else 1.0
        sizes = [size * clipped if size > 0 else size for size in sizes]
        largest[:] = [max(a, b) for a, b in zip(largest or sizes, sizes, strict=True)]
        return updated, norm, more

    optimizer.step = step
    return lambda: largest


def _size(gradient: Tensor | None) -> float:
    if gradient is None:
        return -1.0
    return float(gradient.abs().max()) if gradient.numel() else 0.0


def generator_fingerprints() -> dict[str, str]:
    """Where each random number generator of this process stands."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": repr(np.random.get_state()).encode(),
    }
    for name, state in get_cuda_rng_tracker().get_states().items():
        raw = state if isinstance(state, Tensor) else state.get_state()
        states[f"tracker {name}"] = raw.cpu().numpy().tobytes()
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in states.items()}
