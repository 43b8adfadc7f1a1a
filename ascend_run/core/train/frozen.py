"""Forwards of the models that are not trained, before those of the trained one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, nn

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c

from .phases import phase_scope


class FrozenForward:
    """Run a frozen model over the micro-batches of a global batch, and add its results to them.

    It is a schedule of its own, so the stages of the trained model exchange the same tensors as
    without it, in the same order.
    """

    def __init__(
        self, hooks: Hooks, context: c.RunContext, role: c.RoleSpec, trained: c.ModelBundle
    ) -> None:
        self._context, self._role = context, role
        self._bundle = trained if role.is_base else context.models[role.name]
        self._phase = phase_scope(hooks, context, c.RunPhase.REFERENCE)
        config = self._bundle.transformer_config
        pp = context.groups.pp
        self._p2p = P2PCommunicator(pp, config) if pp.size() > 1 else None
        self._schedule = get_forward_backward_func()

    @torch.no_grad()
    def __call__(
        self, batches: Sequence[c.Batch], seq_length: int, micro_batch_size: int
    ) -> list[c.Batch]:
        """Return the micro-batches; on the last pipeline stage, with the model's results.

        Args:
            seq_length: Of the activations that pipeline stages exchange. Unit: tokens.
            micro_batch_size: Likewise. Unit: rows.
        """
        with self._phase(), self._evaluating():
            results: list[Tensor] = self._schedule(
                forward_step_func=self._forward_step,
                data_iterator=list(itertools.tee(iter(batches), len(self._bundle.chunks))),
                model=self._bundle.chunks,
                num_microbatches=len(batches),
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                forward_only=True,
                pg_collection=self._context.groups,
                p2p_communicator=self._p2p,
            )
        if not results:  # another stage
            return [*batches]
        return [self._with(batch, result) for batch, result in zip(batches, results, strict=True)]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Set the chunks to evaluation, and afterwards back to their mode. The timers of a trained
        model do not see these forwards."""
        config, chunks = self._bundle.transformer_config, self._bundle.chunks
        trains, timers, config.timers = [chunk.training for chunk in chunks], config.timers, None
        for chunk in chunks:
            chunk.eval()
        try:
            yield
        finally:
            config.timers = timers
            for chunk, was_training in zip(chunks, trains, strict=True):
                chunk.train(was_training)

    def _forward_step(self, batches: Iterator[c.Batch], model: nn.Module) -> tuple[Tensor, None]:
        assert self._role.frozen_step is not None
        return self._role.frozen_step(self._context, model, next(batches)), None

    def _with(self, batch: c.Batch, result: Tensor) -> c.Batch:
        name = self._role.name
        field = c.BatchField(axes=tuple(f"{name} {axis}" for axis in range(result.dim())))
        return attrs.evolve(
            batch,
            tensors={**batch.tensors, name: result.detach()},
            fields={**batch.fields, name: field},
        )
