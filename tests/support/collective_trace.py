"""A rank's job: matmuls and collectives of a step as ``benchmarks.ring_simulator`` takes them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch.distributed as dist
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ascend_run.testing.effects import count_both
from benchmarks.ring_simulator import Event
from tests.support.small_runs import training

HOPS: Final = {
    "_allgather_base_": lambda size: size - 1,
    "_reduce_scatter_base_": lambda size: (size - 1) / size,
    "allreduce_": lambda size: 2 * (size - 1) / size,
}
"""Collective -> what a rank of a ring sends, in sizes of its input."""


def record(values: Mapping[str, Any], plugins: Sequence[str]) -> list[Event]:
    """Take one training step and return what this rank did. Each collective is one send to the next
    rank and one receive, of the bytes that a ring sends."""
    with training(values, plugins) as run:
        recorder = _Recorder()
        with recorder.patched():
            run.step()
        return recorder.events


def _flops(function: Any, arguments: Sequence[Any], result: Any) -> float:
    """Return the FLOPs of a matmul, or of an attention kernel as if nothing were masked."""
    if function._opname == "_linear_pointwise":  # of oneDNN, which the counter does not know
        rows, weight = arguments[:2]
        return float(2 * rows.numel() * weight.shape[0])
    if function._opname.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        is_backward = function._opname.endswith("backward")
        flops = sdpa_flop_count(*(t.shape for t in arguments[is_backward : 3 + is_backward]))
        return float(flops * 5 / 2 if is_backward else flops)  # five matmuls for two
    count = flop_registry.get(function._overloadpacket)
    return float(count(*arguments, out_val=result)) if count else 0.0


class _Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ids = itertools.count()
        self._launched: list[int] | None = None
        """Sends of the collective whose work is returned; None: it is awaited at once."""

    @contextmanager
    def patched(self) -> Iterator[None]:
        names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
        launched = {name: self._noted(getattr(dist, name)) for name in names}
        with mock.patch.multiple(dist, **launched), count_both(self._see):
            yield

    def _noted(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("async_op"):
                return inner(*args, **kwargs)
            self._launched = []
            work = inner(*args, **kwargs)
            ids, self._launched = self._launched, None
            return _Work(self, ids, work)

        return call

    def _see(self, function: Any, arguments: Sequence[Any], result: Any) -> None:
        if flops := _flops(function, arguments, result):
            self.events.append(("compute", flops))
        if function._opname in HOPS:
            self._send(function._opname, arguments)

    def _send(self, name: str, arguments: Sequence[Any]) -> None:
        sent = arguments[0 if name == "allreduce_" else 1]
        tensors = sent if isinstance(sent, list) else [sent]
        group = next(dist.ProcessGroup.unbox(a) for a in arguments if hasattr(a, "_type"))
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
        if len(ranks) == 1:
            return
        at, nbytes = ranks.index(rank), sum(t.nbytes for t in tensors) * HOPS[name](len(ranks))
        ids = []
        for kind, other in (("send", ranks[(at + 1) % len(ranks)]), ("recv", ranks[at - 1])):
            ids.append(next(self._ids))
            self.events.append((kind, ids[-1], other, nbytes, str(ranks)))
        if self._launched is None:
            self.wait(ids)
        else:
            self._launched += ids

    def wait(self, ids: Sequence[int]) -> None:
        self.events += [("wait", number) for number in ids]


class _Work:
    """The work of a collective, which records its wait."""

    def __init__(self, recorder: _Recorder, ids: Sequence[int], inner: Any) -> None:
        self._recorder, self._ids, self._inner = recorder, ids, inner

    def wait(self) -> Any:
        self._recorder.wait(self._ids)
        return self._inner.wait()
