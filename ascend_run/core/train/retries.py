"""Try the forward and backward of a step again if memory ran out and a plugin makes room."""

from __future__ import annotations

import gc
import itertools
import traceback
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import torch

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import contracts as c

from .models import release_graphs
from .seeding import random_state
from .totals import LossTotals

Run: TypeAlias = Callable[[Iterator[c.Batch], int], LossTotals]
MOST_TRIES: Final = 20  # of one step


class Retries:
    """Further tries of steps; none on several ranks, where the others would wait for this one."""

    def __init__(self, hooks: Hooks, context: c.RunContext, bundle: c.ModelBundle) -> None:
        self._hooks, self._context, self._bundle = hooks, context, bundle
        hook, alone = "ascend_out_of_memory", context.layout.world_size == 1
        self._make_room = [
            hooks.naming(hook, plugin).around(function)
            for plugin, function in hooks.contributions(hook, context=context)
            if alone and not context.config.ddp.overlap_grad_reduce
        ]
        self.counts: list[tuple[object, str]] = []
        """(owner, attribute) of what forwards count, in a new value each time."""

    def __call__(self, run: Run, batches: Iterator[c.Batch], number: int) -> LossTotals:
        """Call a function, which zeroes gradients first, with the batches of a step."""
        if not self._make_room:
            return run(batches, number)
        given, restore, tries = [*itertools.islice(batches, number)], self._snapshot(), 1
        while True:
            try:
                return run(iter(given), number)
            except torch.OutOfMemoryError as error:
                self._free(error)
                if tries == MOST_TRIES or not any(make_room() for make_room in self._make_room):
                    raise
            tries += 1
            restore()
            self._hooks.event("ascend_before_step")(context=self._context)

    def _free(self, error: BaseException | None) -> None:
        """Free what frames and graphs of a try hold; the traceback can still be printed."""
        self._context.device.synchronize()  # copies of a plugin may be under way
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        release_graphs(self._context)
        torch.zeros((), requires_grad=True).backward()  # torch's queue drops what was ready
        gc.collect()

    def _snapshot(self) -> Callable[[], None]:
        """Return a function that restores what forward and backward change."""
        counts = [(owner, name, getattr(owner, name)) for owner, name in self.counts]
        found = (torch.nn.Module.buffers(chunk) for chunk in self._bundle.chunks)
        buffers = [(buffer, buffer.clone()) for buffer in itertools.chain(*found)]
        states = random_state().state_dict()

        def restore() -> None:
            random_state().load_state_dict(states)
            for owner, name, value in counts:
                setattr(owner, name, value)
            for buffer, value in buffers:
                buffer.copy_(value)

        return restore
