"""Context-parallel plugins on the ranks of a pool, against the formula."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._pytree import tree_leaves

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import Layout, RunConfig
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.effects import Collectives, count_collectives
from ascend_run.types.config import DataSection
from tests.support.tiny_configs import model_fields, parallel_fields

from .ring_formula import Case, FormulaKernel

Wrap = Callable[..., c.AttentionKernel]


@attrs.frozen(kw_only=True)
class Outcome:
    """One rank's results."""

    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]
    saved_bytes: int
    peak_bytes: int
    """Peak bytes of live tensors, including inputs, over forward and backward."""
    forward: Collectives
    backward: Collectives
    visible: list[int]
    """Visible scores in each block of forward."""
    specs: list[c.AttentionSpec]


def run_of(size: int, length: int = 1024) -> RunConfig:
    """Return a run config. A single rank is tested as well: it must be right without
    communication."""
    parallel = {
        "context_parallel_size": max(2, size),
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
    }
    return RunConfig(
        model=model_fields({"num_attention_heads": 8, "num_layers": 2}),
        parallel=parallel_fields(parallel),
        data=DataSection(seq_length=length),
    )


def held(plugin: Any, case: Case, length: int, rank: int, size: int) -> list[int]:
    """Return the positions of a rank by the plugin's partition."""
    partition = plugin.ascend_sequence_partition(config=run_of(size, length))
    partition = c.partition_of(partition, case.mask.document_ends)
    return [p for chunk in partition.chunks(length, rank, size) for p in range(*chunk)]


def wrapping(plugin: Any) -> Wrap:
    """Return the plugin's kernel wrapper in a run on these ranks."""
    hooks, config = Hooks([plugin]), run_of(dist.get_world_size())
    layout = Layout(
        world_size=dist.get_world_size(), rank=dist.get_rank(), cp=dist.get_world_size()
    )
    groups = SimpleNamespace(cp=dist.group.WORLD)
    planned = hooks.merge("ascend_process_groups", config=config, layout=layout)
    for name in sorted(planned):
        for ranks in planned[name]:
            group = dist.new_group(list(ranks))
            if layout.rank in ranks:
                setattr(groups, name, group)
    return lambda inner, length=1024: hooks.wrap(
        "ascend_attention",
        inner,
        config=run_of(dist.get_world_size(), length),
        groups=groups,
        layer_index=0,
    )


def platform_kernel() -> c.AttentionKernel:
    """Return the CPU's kernel."""
    (entry,) = entry_points(group="ascend_run.platforms", name="cpu")
    plugin = entry.load()
    config = RunConfig(model=model_fields(), parallel=parallel_fields())
    hooks = Hooks([plugin(plugin.config_class())])
    ops = hooks.require("ascend_platform_ops", config=config)
    return hooks.require("ascend_attention_kernel", config=config, ops=ops)


def attend(plugin: Any, cases: Sequence[Case], platform: bool = False) -> list[Outcome]:
    """Run forward and backward of this rank's part of each case."""
    wrap = wrapping(plugin)
    return [
        attend_with(
            functools.partial(wrap, length=case.length),
            platform_kernel() if platform else FormulaKernel(case.reads),
            plugin,
            case,
        )
        for case in cases
    ]


def attend_with(wrap: Wrap, inner: c.AttentionKernel, plugin: Any, case: Case) -> Outcome:
    from benchmarks.live_storages import LiveStorages

    rank, size = dist.get_rank(), dist.get_world_size()
    rows = held(plugin, case, case.length, rank, size)
    columns = held(plugin, case, case.num_keys, rank, size)
    q, k, v, dout = case.tensors()
    q, dout, k, v = (x.to(case.dtype) for x in (q[rows], dout[rows], k[columns], v[columns]))
    kernel = wrap(inner)
    with LiveStorages([q, k, v, dout]) as storages:
        with count_collectives() as forward:
            result = kernel.forward(q, k, v, case.spec)
        named = {"q": q, "k": k, "v": v, "out": result.out, "lse": result.lse}
        given = [x if name in kernel.backward_reads else None for name, x in named.items()]
        with count_collectives() as backward:
            gradients = kernel.backward(dout, *given, result.saved, case.spec)
    return Outcome(
        out=result.out,
        lse=result.lse,
        gradients=gradients,
        saved_bytes=bytes_in(result.saved),
        peak_bytes=storages.peak,
        forward=forward,
        backward=backward,
        visible=getattr(inner, "visible", []),
        specs=getattr(inner, "specs", []),
    )


def bytes_in(saved: Any) -> int:
    """Return the bytes of the distinct storages of a record's tensors."""
    tensors = [x for x in tree_leaves(saved) if isinstance(x, Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


class Noting:
    """The platform's kernel, recording the seeds it gets."""

    def __init__(self) -> None:
        self._inner = platform_kernel()
        self.features, self.backward_reads = self._inner.features, self._inner.backward_reads
        self.forward_seeds: list[int] = []
        self.backward_seeds: list[int] = []

    def forward(self, *arguments: Any) -> c.AttentionResult:
        self.forward_seeds.append(arguments[-1].dropout.seed)
        return self._inner.forward(*arguments)

    def backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        self.backward_seeds.append(arguments[-1].dropout.seed)
        return self._inner.backward(*arguments)


def dropped(plugin: Any, case: Case) -> tuple[Outcome, list[int], list[int]]:
    """Return this rank's results, and the seeds of the blocks in forward and backward."""
    inner = Noting()
    wrap = functools.partial(wrapping(plugin), length=case.length)
    outcome = attend_with(wrap, inner, plugin, case)
    return outcome, inner.forward_seeds, inner.backward_seeds


class GatheringKernel:
    """The inefficient baseline: every rank gathers the full sequence and attends to all of it."""

    backward_reads = frozenset({"q", "k", "v", "out", "lse"})

    def __init__(self, inner: c.AttentionKernel) -> None:
        self.inner, self.features = inner, inner.features

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: c.AttentionSpec) -> c.AttentionResult:
        whole = [_gathered(x) for x in (q, k, v)]
        result = self.inner.forward(*whole, spec)
        mine = slice(dist.get_rank() * q.shape[0], (dist.get_rank() + 1) * q.shape[0])
        return c.AttentionResult(
            result.out[mine], result.lse[..., mine], (*whole, result.out, result.lse)
        )

    def backward(self, dout: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        saved, spec = rest[-2:]
        gradients = self.inner.backward(_gathered(dout), *saved, (), spec)
        size = dist.get_world_size()
        return tuple(x.chunk(size)[dist.get_rank()].clone() for x in gradients)


def _gathered(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def attend_gathering(plugin: Any, case: Case) -> Outcome:
    """Run the gathering baseline on contiguous shards."""
    return attend_with(GatheringKernel, platform_kernel(), plugin, case)


def attend_whole_of(case: Case) -> Outcome:
    """Return what a gathering rank holds: attention to the full sequence from shards of any
    length."""
    from benchmarks.live_storages import LiveStorages

    q, k, v, dout = case.tensors()
    kernel = platform_kernel()
    with LiveStorages([q, k, v, dout]) as storages:
        result = kernel.forward(q, k, v, case.spec)
        kernel.backward(dout, q, k, v, result.out, result.lse, result.saved, case.spec)
    return Outcome(
        out=result.out,
        lse=result.lse,
        gradients=(),
        saved_bytes=0,
        peak_bytes=storages.peak,
        forward=Collectives(),
        backward=Collectives(),
        visible=[],
        specs=[],
    )


def attend_whole(case: Case) -> Outcome:
    """Run the platform's kernel on the full sequence, in bfloat16."""
    q, k, v, dout = (x.bfloat16() for x in case.tensors())
    kernel = platform_kernel()
    result = kernel.forward(q, k, v, case.spec)
    gradients = kernel.backward(
        dout,
        *(
            x if name in kernel.backward_reads else None
            for name, x in (("q", q), ("k", k), ("v", v), ("out", result.out), ("lse", result.lse))
        ),
        result.saved,
        case.spec,
    )
    return Outcome(
        out=result.out,
        lse=result.lse,
        gradients=gradients,
        saved_bytes=0,
        peak_bytes=0,
        forward=Collectives(),
        backward=Collectives(),
        visible=[],
        specs=[],
    )


def features(plugin: Any) -> tuple[c.AttentionFeatures, c.AttentionFeatures]:
    """Return its features around the platform's kernel, and around the formula."""
    wrap = wrapping(plugin)
    return wrap(platform_kernel()).features, wrap(FormulaKernel()).features
