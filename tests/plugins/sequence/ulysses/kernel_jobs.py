"""A context-parallel kernel on a rank, around an inner kernel written from the formula."""

from __future__ import annotations

from importlib.metadata import entry_points
from types import SimpleNamespace

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import RunConfig
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.effects import Collectives, count_collectives
from tests.support.ring_jobs import bytes_in
from tests.support.tiny_configs import model_fields, parallel_fields

# S sequence, B batch, N query heads, G key-value heads, D and E widths

ALL_FEATURES = c.AttentionFeatures(
    window=True, documents=True, bias=True, sinks=True, packed=True, unequal_widths=True
)


@attrs.frozen(kw_only=True)
class Case:
    """One attention problem; every rank draws the same full tensors."""

    heads: int = 8
    groups: int = 8
    batch: int | None = 2
    """None is the packed layout."""
    length: int = 16
    key_length: int | None = None
    width: int = 4
    value_width: int = 4
    sinks: bool = False
    start: int = 0
    """The caller's position of this rank's first query."""
    reads: frozenset[str] = frozenset({"q", "k", "v"})
    """What the inner kernel's backward reads."""

    @property
    def spec(self) -> c.AttentionSpec:
        sinks = draw(self.heads, seed=9) if self.sinks else None
        mask = c.Mask(causal=self.key_length is None, query_start=self.start, key_start=self.start)
        return c.AttentionSpec(scale=0.3, mask=mask, sinks=sinks)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the full q, k, v and the gradient of the output."""
        batch = () if self.batch is None else (self.batch,)
        keys = self.key_length or self.length
        return (
            draw(self.length, *batch, self.heads, self.width, seed=1),
            draw(keys, *batch, self.groups, self.width, seed=2),
            draw(keys, *batch, self.groups, self.value_width, seed=3),
            draw(self.length, *batch, self.heads, self.value_width, seed=4),
        )


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: c.AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Return output [S, B, N, E] and log-sum-exp [B, N, S] by the formula, differentiable."""
    packed = q.dim() == 3
    if packed:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * spec.scale
    if spec.mask.causal:
        rows = spec.mask.query_start + torch.arange(q.shape[0])
        columns = spec.mask.key_start + torch.arange(k.shape[0])
        scores = scores.masked_fill(rows[:, None] < columns[None], float("-inf"))
    logits = scores
    if spec.sinks is not None:
        sink = spec.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat((scores, sink), dim=-1)
    lse = logits.logsumexp(-1)
    out = torch.einsum("bnst,tbne->sbne", (scores - lse.unsqueeze(-1)).exp(), v)
    return (out.squeeze(1), lse.squeeze(0)) if packed else (out, lse)


class PlainKernel:
    """contracts.AttentionKernel on the formula above; backward recomputes under autograd."""

    features = ALL_FEATURES

    def __init__(self, reads: frozenset[str]) -> None:
        self.backward_reads = reads
        self.saw: list[c.AttentionSpec] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: c.AttentionSpec) -> c.AttentionResult:
        self.saw.append(spec)
        out, lse = plain_attention(q, k, v, spec)
        hidden = tuple(
            x for name, x in (("q", q), ("k", k), ("v", v)) if name not in self.backward_reads
        )
        return c.AttentionResult(out, lse, hidden)

    def backward(
        self,
        dout: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        saved: tuple[Tensor, ...],
        spec: c.AttentionSpec,
    ) -> tuple[Tensor, ...]:
        self.saw.append(spec)
        for name, value in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)):
            assert (value is not None) == (name in self.backward_reads), name
        hidden = list(saved)
        given = [x if x is not None else hidden.pop(0) for x in (q, k, v)]
        assert not hidden, "something is kept that nobody reads"
        leaves = [x.detach().requires_grad_() for x in given]
        sinks = None if spec.sinks is None else spec.sinks.detach().requires_grad_()
        with torch.enable_grad():
            again, again_lse = plain_attention(*leaves, attrs.evolve(spec, sinks=sinks))
        if out is not None:
            assert torch.equal(out, again)
        if lse is not None:
            assert torch.equal(lse, again_lse)
        return torch.autograd.grad(again, leaves + ([] if sinks is None else [sinks]), dout)


@attrs.frozen(kw_only=True)
class Outcome:
    """One rank's results."""

    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]
    saved_bytes: int
    messages: Collectives
    inner_specs: list[c.AttentionSpec]


def exchanging(name: str, inner: c.AttentionKernel) -> c.AttentionKernel:
    """Return the kernel that a plugin puts around another, as in a run on these ranks."""
    (entry,) = entry_points(group="ascend_run.plugins", name=name)
    plugin = entry.load()
    # A single rank is tested as well: it must be right without communication.
    parallel = {
        "context_parallel_size": max(2, dist.get_world_size()),
        "tensor_model_parallel_size": 1,
    }
    config = RunConfig(model=model_fields(), parallel=parallel_fields(parallel))
    options = getattr(plugin, "config_class", None)
    return Hooks([plugin(options()) if options else plugin()]).wrap(
        "ascend_attention",
        inner,
        config=config,
        groups=SimpleNamespace(cp=dist.group.WORLD),
        layer_index=0,
    )


def backward(
    kernel: c.AttentionKernel,
    dout: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: c.AttentionResult,
    spec: c.AttentionSpec,
) -> tuple[Tensor, ...]:
    """Call the kernel's backward with only what it declares to read."""
    named = dict(zip(("q", "k", "v", "out", "lse"), (*inputs, result.out, result.lse), strict=True))
    given = (tensor if name in kernel.backward_reads else None for name, tensor in named.items())
    return kernel.backward(dout, *given, result.saved, spec)


def attend(exchange: str, case: Case) -> Outcome:
    """Run forward and backward of this rank's part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v, dout = (x.chunk(size)[rank] for x in case.tensors())
    inner = PlainKernel(case.reads)
    kernel = exchanging(exchange, inner)
    with count_collectives() as messages:
        result = kernel.forward(q, k, v, case.spec)
        gradients = backward(kernel, dout, (q, k, v), result, case.spec)
    return Outcome(
        out=result.out,
        lse=result.lse,
        gradients=gradients,
        saved_bytes=bytes_in(result.saved),
        messages=messages,
        inner_specs=inner.saw,
    )


def inner_dropout_seeds(exchange: str) -> list[int]:
    """Return the seeds that the inner kernel gets in forward and in backward."""
    case = Case()
    spec = attrs.evolve(case.spec, dropout=c.Dropout(probability=0.1, seed=5))
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v, dout = (x.chunk(size)[rank] for x in case.tensors())
    inner = PlainKernel(case.reads)
    kernel = exchanging(exchange, inner)
    backward(kernel, dout, (q, k, v), kernel.forward(q, k, v, spec), spec)
    return [spec.dropout.seed for spec in inner.saw if spec.dropout]
