"""One pass of a model that is not part of the steps over samples of a task."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import attrs

from ascend_run.core.data.batches import BatchPlan, rows_and_length
from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c
from ascend_run.types.data import Samples

from .batches import BatchReader
from .frozen import FrozenForward


@attrs.define
class FrozenPass:
    """``RunContext.frozen_pass`` of a rank whose models are built."""

    hooks: Hooks
    build: Callable[[c.RunContext, c.ModelBundle], None]
    """Gives a bundle its chunks, with their weights."""
    repeatable: bool = True

    def __call__(
        self,
        context: c.RunContext,
        role: c.RoleSpec,
        samples: Samples,
        fields: Mapping[str, c.BatchField],
    ) -> Iterator[c.Batch]:
        """Yield this rank's micro-batches of one sample each, with the results of the model."""
        plan = attrs.evolve(BatchPlan.of_rank(context.config, context.layout), micro_batch_size=1)
        batches = BatchReader(self.hooks, context, fields, plan)(samples, 0, f"{role.name}'s")
        policy = next(one for one in context.models.values() if not one.frozen)
        with self._built(context, role):
            forward = FrozenForward(self.hooks, context, role, policy)
            for _ in range(0, len(samples) - plan.global_batch_size + 1, plan.global_batch_size):
                some = [*itertools.islice(batches, plan.num_microbatches)]
                rows, length = rows_and_length(some[0])
                yield from forward(some, length * context.groups.cp.size(), rows)

    @contextmanager
    def _built(self, context: c.RunContext, role: c.RoleSpec) -> Iterator[None]:
        """Build a model that has weights of its own, and free it at the end."""
        if role.is_base:
            yield
            return
        bundle = context.models[role.name]
        self.build(context, bundle)
        try:
            yield
        finally:
            bundle.chunks.clear()
