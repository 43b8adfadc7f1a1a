"""Probe a run on one rank: gradients of the first batch, then some training steps."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from ascend_run.core.rank.rank_environment import ATTEMPT_VARIABLE
from ascend_run.core.run import RunRequest, prepared_rank
from ascend_run.core.train.data_parallel import gather_parameters
from ascend_run.core.train.seeding import seed_everything
from ascend_run.core.train.step import ForwardBackward, StepResult
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.dry_run import DryRun, gradient_of
from ascend_run.testing.gradients.parameters import parameter_derivatives

from .acting import Acting
from .activation_slopes import module_with_wrong_backward
from .cases import routing_recorded
from .copies import stale_parameters
from .declared import Declared
from .masks import masks_recorded
from .rates import watched_rates
from .record import Record, RecordedShard
from .skipped_step import overflowing_step
from .step_gradients import StepGradients
from .taps import tapped

HALF: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""``train.precision`` -> dtype of the parameters."""
_SEED: Final = 5
_CHANGE: Final = 0.1
"""Of a parameter that is constant at first, before gradients are compared with differences."""
MakeDataset = Callable[[DryRun, int], Any]
"""(dry run, number of samples) -> the run's training samples."""
Part = Callable[[DryRun, MakeDataset, Record, int], None]
"""Builds the models and records a part of the run."""


def run_probes(
    make_request: Callable[[], RunRequest],
    make_dataset: MakeDataset,
    steps: int,
    *,
    by_differences: bool = False,
    only_masks: bool = False,
    only_steps: bool = False,
    saves: bool = False,
    probe_inputs: bool = False,
) -> Record:
    """Record gradients in float64, moments of every module in a second such run, and training steps
    in float32; for a run in half precision, gradients and steps in that precision.

    Each part is a separate run from the same seed with new plugin instances: hooks for the moments
    may change how modules execute (a compiled layer runs eagerly), so nothing else is recorded in
    that run.

    Args:
        make_request: Called once per part.
        by_differences: Compare gradients with differences of the loss as well, on one rank.
        only_masks: Record the dropout masks of one global batch instead.
        only_steps: Leave out the gradients and the moments.
        saves: Save a checkpoint after the steps.
        probe_inputs: Change weights and activations as ``DryRun`` does, to meet hard cases.
    """
    record: Record | None = None
    in_half = make_request().config.train.precision in HALF
    exact = (_watched, _by_differences) if by_differences else (_watched,)
    train = partial(_train, saves=saves)
    parts: list[Part] = [_gradients, *(() if in_half else exact), train]
    if only_masks or only_steps:
        parts = [_drop if only_masks else train]
    for part in parts:
        with _separate_store(_name(part)), prepared_rank(make_request()) as (hooks, context):
            seed_everything(context.config, context.layout)
            if record is None:
                record = _empty_record(context)
            # At a tie the loss jumps, and differences show no slope.
            at_ties = probe_inputs and part is not _by_differences
            dry_run = DryRun(hooks, context, probe_weights=at_ties, offsets=probe_inputs)
            part(dry_run, make_dataset, record, steps)
            record.cases.offsets += dry_run.num_offsets
    assert record is not None
    return record


def _name(part: Part) -> str:
    return str(getattr(part, "__name__", "_train"))


@contextmanager
def _separate_store(part: str) -> Iterator[None]:
    """Use another key prefix in the store for each part: under the first one, ranks that create
    their groups again would find addresses that are closed."""
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


def _gradients(dry_run: DryRun, make_dataset: MakeDataset, record: Record, steps: int) -> None:
    precision = dry_run.context.config.train.precision
    forward_backward = dry_run.for_gradients(HALF.get(precision, torch.float64))
    _record_initial(dry_run, record)
    counted = _count_forwards(dry_run)
    record.loss, record.num_tokens, taken = _one_batch(dry_run, forward_backward, make_dataset)
    # A custom schedule may call parts of the model only; then the batches that it read are counted.
    record.micro_batches = counted() or taken
    found = dry_run.shards(gradient_of)
    record.gradients = [None if p.tensor is None else _copied(p.tensor) for p in found]


def _record_initial(dry_run: DryRun, record: Record) -> None:
    """Record the parameters of the built models."""
    initial = dry_run.shards(Tensor.detach)
    declared = Declared(dry_run.hooks, dry_run.context)
    record.places = [
        RecordedShard(
            name=p.name,
            offset=p.offset,
            global_shape=p.global_shape,
            trains=p.trains,
            should_train=declared.trains(p),
        )
        for p in initial
    ]
    record.initial = [_copied(p.tensor) for p in initial]
    record.expert_biases = {name: _copied(x) for name, x in dry_run.expert_biases().items()}


def _watched(dry_run: DryRun, make_dataset: MakeDataset, record: Record, steps: int) -> None:
    forward_backward = dry_run.for_gradients(torch.float64)
    layout = dry_run.context.layout
    dp = (layout.coordinate("dp"), layout.dp)
    with (
        torch.compiler.set_stance("force_eager"),  # the hooks cannot be traced
        tapped(dry_run.bundle, dry_run.context.groups, dp, record),
        routing_recorded(dry_run.bundle, dry_run.context.groups.pp.rank(), record.cases),
    ):
        _one_batch(dry_run, forward_backward, make_dataset)


def _by_differences(dry_run: DryRun, make_dataset: MakeDataset, record: Record, steps: int) -> None:
    forward_backward = dry_run.for_gradients(torch.float64)
    _leave_constants(dry_run)
    dataset = make_dataset(dry_run, dry_run.context.config.train.global_batch_size)
    record.derivatives = [*parameter_derivatives(dry_run, forward_backward, dataset)]
    if not all(derivative.agrees for derivative in record.derivatives):
        record.wrong_backward = module_with_wrong_backward(dry_run, forward_backward, dataset)


@torch.no_grad()
def _leave_constants(dry_run: DryRun) -> None:
    """Change parameters whose elements are all equal: a norm's weight of 1 hides a missing factor,
    and a bias or an adapter of 0 a missing term."""
    generator = torch.Generator().manual_seed(_SEED)
    for chunk in dry_run.bundle.chunks:
        for parameter in chunk.parameters():
            if parameter.is_meta or parameter.numel() < 2:  # of a weight that is stored otherwise
                continue
            if bool((parameter == parameter.flatten()[0]).all()):
                change = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(_CHANGE * change.to(parameter))


def _drop(dry_run: DryRun, make_dataset: MakeDataset, record: Record, steps: int) -> None:
    forward_backward = dry_run.for_gradients(torch.float32)
    with (
        torch.compiler.set_stance("force_eager"),  # masks of compiled code cannot be seen
        masks_recorded(dry_run.bundle, dry_run.context.groups) as masks,
    ):
        _one_batch(dry_run, forward_backward, make_dataset)
    record.masks = masks


def _train(
    dry_run: DryRun, make_dataset: MakeDataset, record: Record, steps: int, *, saves: bool
) -> None:
    dry_run.build()
    if not record.places:
        _record_initial(dry_run, record)
    step, config = dry_run.train_step(), dry_run.context.config
    acting = Acting(dry_run, step, record.cases, saves=saves)
    gradients = StepGradients(dry_run)
    rates = watched_rates(dry_run)
    samples = config.train.global_batch_size

    def batches_of(num_steps: int) -> Iterator[c.Batch]:
        return dry_run.batches(make_dataset(dry_run, num_steps * samples))

    batches = acting.batches(batches_of(steps))
    results: list[StepResult] = []
    weights = []
    gathers_late = bool(config.ddp.overlap_param_gather)
    for index in range(steps):
        with acting.step(index):
            results.append(dry_run.step(step, batches))
        acting.stepped(results[-1])
        if gathers_late and index < steps - 1:
            continue  # as in training, the next forward gathers them
        gather_parameters(dry_run.bundle)
        weights.append([_copied(p.tensor) for p in dry_run.shards(Tensor.detach)])
    record.weights = weights
    record.losses = [result.loss for result in results]
    record.grad_norms = [
        float("nan") if result.grad_norm is None else result.grad_norm for result in results
    ]
    record.step_tokens = [result.totals.num_tokens for result in results]
    record.peaks, record.step_gradients = gradients.peaks, [*gradients.projections]
    record.rates = {name: [*of_steps] for name, of_steps in rates.items()}
    record.stale, record.num_masters = stale_parameters(dry_run.bundle, config.model.vocab_size)
    record.generators = generator_fingerprints()
    if config.train.precision == "fp16":  # no other precision has a step that is skipped
        result, record.changed_by_overflow = overflowing_step(
            dry_run, step, dry_run.batches(make_dataset(dry_run, (steps + 1) * samples))
        )
        record.cases.skipped += result.skipped
    acting.finish(lambda: batches_of(steps + 1))
    record.activity = acting.activity


def _one_batch(
    dry_run: DryRun, forward_backward: ForwardBackward, make_dataset: MakeDataset
) -> tuple[float, int, int]:
    """Return the loss, the number of tokens, and the number of micro-batches read from the data."""
    samples = dry_run.context.config.train.global_batch_size
    batches, taken = dry_run.batches(make_dataset(dry_run, samples)), 0

    def counted() -> Iterator[c.Batch]:
        nonlocal taken
        for batch in batches:
            taken += 1
            yield batch

    totals = dry_run.gradients(forward_backward, counted())
    return totals.loss, totals.num_tokens, taken


def _copied(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().cpu().clone()


def _count_forwards(dry_run: DryRun) -> Callable[[], int]:
    """Start counting forwards of the first chunk; the returned function stops and returns the
    count."""
    count = 0

    def note(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = dry_run.bundle.chunks[0].register_forward_pre_hook(note)

    def stop() -> int:
        handle.remove()
        return count

    return stop


def generator_fingerprints() -> dict[str, str]:
    """Return a fingerprint of the state of each random number generator of this process."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": repr(np.random.get_state()).encode(),
    }
    for name, state in get_cuda_rng_tracker().get_states().items():
        raw = state if isinstance(state, Tensor) else state.get_state()
        states[f"tracker {name}"] = raw.cpu().numpy().tobytes()
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in states.items()}
