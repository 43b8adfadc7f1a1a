"""Record the communication and computation of a context-parallel kernel, in order.

Calls of torch.distributed are recorded, and the blocks that are passed to the inner kernel. Nothing
here depends on how a kernel works.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.core.hooks import Hooks
from ascend_run.ops.attention.visibility import Rectangle, Shape, rectangles
from ascend_run.plugin_api import AttentionSpec, FieldSection, Layout, RunConfig
from ascend_run.registry.discovery import discover

Event = tuple[Any, ...]
"""``("send" | "recv", id, other rank, bytes, channel)``, ``("wait", id)``, ``("compute", flops)``.

Sends of one channel between two ranks arrive in order."""

HEADS, GROUPS, WIDTH = 8, 4, 16
BACKWARD: Final = 2.5
"""FLOPs of backward relative to forward: five matmuls instead of two."""


class Recorder:
    """Events of one rank."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ids = itertools.count()

    def posted(self, kind: str, other: int, nbytes: int, channel: str) -> int:
        number = next(self._ids)
        self.events.append((kind, number, other, nbytes, channel))
        return number

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        """Record and call ``dist.batch_isend_irecv``."""
        works = _batch_isend_irecv([*operations])
        assert len(works) == len(operations)
        return [
            _Noted(self, [self._of(op)], work) for op, work in zip(operations, works, strict=True)
        ]

    def _of(self, operation: Any) -> int:
        kind = "send" if operation.op is dist.isend else "recv"
        group = dist.get_process_group_ranks(operation.group)
        nbytes = operation.tensor.numel() * operation.tensor.element_size()
        return self.posted(kind, operation.peer, nbytes, f"{group}/{operation.tag}")

    def all_to_all_single(
        self,
        received: Tensor,
        sent: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
    ) -> None:
        """Record ``dist.all_to_all_single`` as sends and receives, and call it."""
        posted = self._to_all(
            _bytes(sent, input_split_sizes, group),
            _bytes(received, output_split_sizes, group),
            group,
        )
        _all_to_all_single(received, sent, output_split_sizes, input_split_sizes, group=group)
        self.events += [("wait", number) for number in posted]

    def all_gather_into_tensor(
        self, received: Tensor, sent: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Record ``dist.all_gather_into_tensor`` as a send to each other rank, and call it."""
        work = _all_gather_into_tensor(received, sent, group=group, async_op=True)
        return self._collective(_bytes(received, None, group), group, work, async_op)

    def reduce_scatter_tensor(
        self, received: Tensor, sent: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Record ``dist.reduce_scatter_tensor`` as a send to each other rank, and call it."""
        work = _reduce_scatter_tensor(received, sent, group=group, async_op=True)
        return self._collective(_bytes(sent, None, group), group, work, async_op)

    def _collective(self, nbytes: Sequence[int], group: Any, work: Any, async_op: bool) -> Any:
        noted = _Noted(self, self._to_all(nbytes, nbytes, group), work)
        if async_op:
            return noted
        noted.wait()
        return None

    def _to_all(self, sent: Sequence[int], received: Sequence[int], group: Any) -> list[int]:
        """Record a send to and a receive from each other rank, in rounds in which no two ranks send
        to the same one: pairwise, if the number of ranks is a power of two."""
        ranks, mine = dist.get_process_group_ranks(group), group.rank()
        size = len(ranks)
        pairs = size & (size - 1) == 0
        posted = []
        for turn in range(1, size):
            to, source = (mine ^ turn,) * 2 if pairs else ((mine + turn) % size, mine - turn)
            posted.append(self.posted("send", ranks[to], sent[to], f"{ranks}"))
            posted.append(self.posted("recv", ranks[source], received[source], f"{ranks}"))
        return posted


def _bytes(x: Tensor, split_sizes: Sequence[int] | None, group: Any) -> list[int]:
    """Bytes of each rank's split of a collective's tensor along dimension 0; equal splits if no
    sizes are given."""
    nbytes = x.numel() * x.element_size()
    if split_sizes is None:
        return [nbytes // group.size()] * group.size()
    return [nbytes // x.shape[0] * rows for rows in split_sizes]


_batch_isend_irecv = dist.batch_isend_irecv
_all_to_all_single = dist.all_to_all_single
_all_gather_into_tensor = dist.all_gather_into_tensor
_reduce_scatter_tensor = dist.reduce_scatter_tensor


@attrs.frozen(eq=False)
class _Noted:
    """A handle of asynchronous communication."""

    recorder: Recorder
    numbers: Sequence[int]
    work: Any

    def wait(self) -> None:
        self.recorder.events += [("wait", number) for number in self.numbers]
        self.work.wait()


class _Inner:
    """The platform's kernel, which records the FLOPs of each block."""

    def __init__(self, inner: Any, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder
        self.features, self.backward_reads = inner.features, inner.backward_reads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Any:
        self._note(q, k, v, spec, 1.0)
        return self._inner.forward(q, k, v, spec)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        self._note(q, k, v, rest[-1], BACKWARD)
        return self._inner.backward(dout, q, k, v, *rest)

    def _note(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, factor: float) -> None:
        visible = sum(scores(part) for part in rectangles(spec.mask, q.shape[0], k.shape[0]))
        products = 2 * visible * q.shape[1] * q.shape[2] * (k.shape[-1] + v.shape[-1])
        self._recorder.events.append(("compute", factor * products))


def scores(part: Rectangle) -> int:
    """Return the number of unmasked scores in a rectangle."""
    if part.shape is Shape.FULL:
        return part.num_queries * part.num_keys
    low = part.low if part.shape is Shape.BAND else -part.num_queries
    return sum(
        max(0, min(i + part.high, part.num_keys - 1) - max(i + low, 0) + 1)
        for i in range(part.num_queries)
    )


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record all communication of this process."""
    recorder = Recorder()
    with (
        mock.patch.object(dist, "batch_isend_irecv", recorder.batch_isend_irecv),
        mock.patch.object(dist, "all_to_all_single", recorder.all_to_all_single),
        mock.patch.object(dist, "all_gather_into_tensor", recorder.all_gather_into_tensor),
        mock.patch.object(dist, "reduce_scatter_tensor", recorder.reduce_scatter_tensor),
    ):
        yield recorder


@contextmanager
def without_overlap() -> Iterator[None]:
    """Wait for all communication immediately: a ring without overlap."""
    from ascend_run.ops.attention.context_parallel import ring

    def blocking(*arguments: Any, **named: Any) -> Any:
        received = pass_on(*arguments, **named).wait()
        return SimpleNamespace(wait=lambda: received)

    pass_on: Callable[..., Any] = ring.pass_on
    with mock.patch.object(ring, "pass_on", blocking):
        yield


def record(plugin: str, options: dict[str, Any], part: int, overlaps: bool = True) -> list[Event]:
    """Record this rank's events of one causal attention, forward and backward, in bfloat16.

    Args:
        plugin: The plugin for context parallelism.
        options: Options of the plugin.
        part: Sequence length on one rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    loaded = discover().load([plugin, "cpu"])
    built = loaded[plugin](loaded[plugin].config_class(**options))
    config = RunConfig(
        model=FieldSection({"num_attention_heads": HEADS, "window_size": None}),
        parallel=FieldSection({"context_parallel_size": size}),
    )
    hooks = Hooks([built])
    groups = _groups(hooks, config, Layout(world_size=size, rank=rank, cp=size))
    platform = Hooks([loaded["cpu"](loaded["cpu"].config_class())])
    ops = platform.require("ascend_platform_ops", config=config)
    kernel = platform.require("ascend_attention_kernel", config=config, ops=ops)
    shapes = ((part, 1, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS))
    q, k, v, dout = (torch.randn(shape).bfloat16() for shape in shapes)
    spec = AttentionSpec(scale=WIDTH**-0.5)
    with recording() as recorder:
        ring = hooks.wrap(
            "ascend_attention",
            _Inner(kernel, recorder),
            config=config,
            groups=groups,
            layer_index=0,
        )
        if overlaps:
            _forward_and_backward(ring, q, k, v, dout, spec)
        else:
            with without_overlap():
                _forward_and_backward(ring, q, k, v, dout, spec)
    return recorder.events


def _groups(hooks: Hooks, config: RunConfig, layout: Layout) -> SimpleNamespace:
    groups = SimpleNamespace(cp=dist.group.WORLD)
    planned = hooks.merge("ascend_process_groups", config=config, layout=layout)
    for name in sorted(planned):
        for ranks in planned[name]:
            group = dist.new_group([*ranks])
            if layout.rank in ranks:
                setattr(groups, name, group)
    return groups


def _forward_and_backward(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, spec: AttentionSpec
) -> None:
    out, lse, saved = kernel.forward(q, k, v, spec)
    named = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    given = (x if name in kernel.backward_reads else None for name, x in named.items())
    kernel.backward(dout, *given, saved, spec)
