"""Record what the ranks of a virtual pipeline do in a step, in order: a job for the pool."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from tests.support.small_runs import training

Event = tuple[Any, ...]
"""``("send" | "recv", id, other rank, bytes, channel)``, ``("wait", id)``, and what is computed:
``(kind, chunk, micro-batch)`` of the kinds below."""
FORWARD, BACKWARD, AHEAD, IN_BACKWARD = "F", "B", "R", "r"
COMPUTED: Final = (FORWARD, BACKWARD, AHEAD, IN_BACKWARD)
"""Forward and backward of a chunk, and a layer of it recomputed ahead of its backward, or by it."""


def record(values: Mapping[str, Any], plugins: Sequence[str]) -> list[Event]:
    """Take one training step and return what this rank did."""
    with training(values, plugins) as run:
        recorder = _Recorder()
        with recorder.patched(run.bundle.chunks):
            run.step()
        return recorder.events


def computed(events: Sequence[Event]) -> str:
    """Return what was computed, such as ``F0.1`` for the forward of chunk 0, micro-batch 1."""
    return " ".join(f"{e[0]}{e[1]}.{e[2]}" for e in events if e[0] in COMPUTED)


def as_trace(events: Sequence[Event], durations: Mapping[str, float]) -> list[Event]:
    """Return the events as ``benchmarks.ring_simulator`` takes them."""
    return [("compute", durations[e[0]]) if e[0] in COMPUTED else e for e in events]


def waits_after_recomputing(events: Sequence[Event]) -> bool:
    """Return whether a rank, after what it recomputes ahead, waits for a receive that it issued
    before."""
    issued = set[int]()
    for event, following in itertools.pairwise(events):
        if event[0] == "recv":
            issued.add(event[1])
        if event[0] != AHEAD or following[0] == AHEAD:
            continue
        if following[0] != "wait" or following[1] not in issued:
            return False
    return True


class _Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ids = itertools.count()
        self._within = ""
        self._now = (0, 0)
        self._outputs: dict[int, tuple[int, int]] = {}
        self._inputs: dict[float, tuple[int, int]] = {}
        """What the MLP of a layer read, which is equal in every bit when it is recomputed."""

    @contextmanager
    def patched(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Record the calls of Megatron's schedule, of torch's sends and receives, and of layers."""
        from megatron.core.pipeline_parallel import schedules

        with ExitStack() as stack:
            for name in ("forward_step", "backward_step"):
                wrapped = getattr(self, f"_{name}")(getattr(schedules, name))
                stack.enter_context(mock.patch.object(schedules, name, wrapped))
            for name, kind, other in (("isend", "send", "dst"), ("irecv", "recv", "src")):
                posted = self._posted(getattr(dist, name), kind, other)
                stack.enter_context(mock.patch.object(dist, name, posted))
            for chunk in chunks:
                for layer in chunk.module.decoder.layers:
                    hook = layer.mlp.register_forward_pre_hook(self._layer)
                    stack.callback(hook.remove)
            yield

    def _forward_step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, current_microbatch: int, vp_stage: int, **more: Any) -> Any:
            self._within, self._now = FORWARD, (vp_stage, current_microbatch)
            out = inner(*args, current_microbatch=current_microbatch, vp_stage=vp_stage, **more)
            self._within = ""
            self.events.append((FORWARD, *self._now))
            self._outputs[id(out[0])] = self._now
            return out

        return run

    def _backward_step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
            self._within, self._now = BACKWARD, self._outputs.pop(id(output_tensor))
            gradient = inner(input_tensor, output_tensor, *args)
            self._within = ""
            self.events.append((BACKWARD, *self._now))
            return gradient

        return run

    def _layer(self, module: object, inputs: tuple[Tensor, ...]) -> None:
        """Tell a layer's forward from its repetition."""
        seen = inputs[0].detach().double().sum().item()
        if self._within == FORWARD:
            self._inputs[seen] = self._now
            return
        kind = IN_BACKWARD if self._within == BACKWARD else AHEAD
        self.events.append((kind, *self._inputs[seen]))

    def _posted(self, inner: Callable[..., Any], kind: str, other: str) -> Callable[..., Any]:
        def post(*, tensor: Tensor, group: Any, **peer: int) -> Any:
            number = next(self._ids)
            size = tensor.numel() * tensor.element_size()
            channel = "all ranks" if group is dist.group.WORLD else "pipeline"
            self.events.append((kind, number, peer[other], size, channel))
            return _Noted(self, number, inner(tensor=tensor, group=group, **peer))

        return post


class _Noted:
    """The handle of a send or receive, which records its wait."""

    def __init__(self, recorder: _Recorder, number: int, inner: Any) -> None:
        self._recorder, self._number, self._inner = recorder, number, inner

    def wait(self) -> None:
        self._recorder.events.append(("wait", self._number))
        self._inner.wait()
