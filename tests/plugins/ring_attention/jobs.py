"""The ring's kernel on a rank."""

from __future__ import annotations

from importlib.metadata import entry_points
from types import SimpleNamespace

import attrs
from torch import Tensor
from torch import distributed as dist

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import FieldSection, RunConfig
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.effects import Collectives, count_collectives
from ascend_run.plugins.ring_attention import RingAttention, RingAttentionConfig

from .formula import Case, FormulaKernel


@attrs.frozen(kw_only=True)
class Outcome:
    """What one rank gives back."""

    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]
    saved_bytes: int
    forward: Collectives
    backward: Collectives
    visible: list[int]
    """Scores that count in each block of forward."""
    specs: list[c.AttentionSpec]


def ring(inner: c.AttentionKernel, *, cut: str, keep: str = "nothing") -> c.AttentionKernel:
    """The kernel that the plugin puts around another, as in a run on these ranks."""
    # Of one rank too it is asked for: it must be right, though there is nothing to pass.
    parallel = {"context_parallel_size": max(2, dist.get_world_size())}
    config = RunConfig(model=FieldSection({}), parallel=FieldSection(parallel))
    plugin = RingAttention(RingAttentionConfig(cut=cut, keep=keep))  # type: ignore[arg-type]
    groups = SimpleNamespace(cp=dist.group.WORLD)
    hooks = Hooks([plugin])
    return hooks.wrap("ascend_attention", inner, config=config, groups=groups, layer_index=0)


def platform_kernel() -> c.AttentionKernel:
    """The CPU's own."""
    (entry,) = entry_points(group="ascend_run.platforms", name="cpu")
    plugin = entry.load()
    config = RunConfig(model=FieldSection({}), parallel=FieldSection({}))
    return Hooks([plugin()]).require("ascend_attention_kernel", config=config)


def attend(case: Case, platform: bool = False) -> Outcome:
    """Forward and backward of this rank's part."""
    inner = platform_kernel() if platform else FormulaKernel(case.reads)
    return attend_with(inner, case)


def attend_with(inner: c.AttentionKernel, case: Case) -> Outcome:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, columns = case.rows(rank, size), case.columns(rank, size)
    q, k, v, dout = case.tensors()
    q, dout, k, v = q[rows], dout[rows], k[columns], v[columns]
    kernel = ring(inner, cut=case.cut, keep=case.keep)
    with count_collectives() as forward:
        result = kernel.forward(q, k, v, case.spec)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in result.saved}
    named = {"q": q, "k": k, "v": v, "out": result.out, "lse": result.lse}
    given = (x if name in kernel.backward_reads else None for name, x in named.items())
    with count_collectives() as backward:
        gradients = kernel.backward(dout, *given, result.saved, case.spec)
    return Outcome(
        out=result.out,
        lse=result.lse,
        gradients=gradients,
        saved_bytes=sum(storages.values()),
        forward=forward,
        backward=backward,
        visible=getattr(inner, "visible", []),
        specs=getattr(inner, "specs", []),
    )


def dropped(seed: int) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Output, gradient of v, and the seeds of the blocks in forward and backward."""
    case = Case()
    spec = attrs.evolve(case.spec, dropout=c.Dropout(probability=0.5, seed=seed))
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = case.rows(rank, size)
    q, k, v, dout = (x[rows] for x in case.tensors())
    seeds: list[int] = []

    class Noting:
        """The platform's kernel, and the seeds that it sees."""

        def __init__(self) -> None:
            self._inner = platform_kernel()
            self.features, self.backward_reads = self._inner.features, self._inner.backward_reads

        def forward(self, *arguments):  # type: ignore[no-untyped-def]
            seeds.append(arguments[-1].dropout.seed)
            return self._inner.forward(*arguments)

        def backward(self, *arguments):  # type: ignore[no-untyped-def]
            seeds.append(arguments[-1].dropout.seed)
            return self._inner.backward(*arguments)

    kernel = ring(Noting(), cut="zig-zag")
    result = kernel.forward(q, k, v, spec)
    forward = list(seeds)
    seeds.clear()
    _, _, dv = kernel.backward(dout, q, None, None, result.out, result.lse, result.saved, spec)
    return result.out, dv, forward, seeds
