"""Attention kernel calls of every kind, and the comparison of a kernel with the formula."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from ascend_run.plugin_api import AttentionKernel, AttentionSpec, Mask, PositionBias

from .attention_reference import attend

TOLERANCE = 1e-10
SCALE = 0.37


@attrs.frozen(kw_only=True)
class Problem:
    """Shapes and features of one call."""

    queries: int = 12
    keys: int = 12
    batch: int = 2
    groups: int = 2
    heads_per_group: int = 2
    width: int = 8
    value_width: int = 8
    mask: Mask = attrs.field(factory=Mask)
    bias: tuple[int, ...] | None = None
    positions: str = ""
    """The position bias is proportional to ``distance`` or its ``root``; empty: none."""
    sinks: bool = False
    softcap: float | None = None
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.groups * self.heads_per_group

    def draw(self, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], AttentionSpec]:
        """Draw q, k, v, then bias and sinks if requested; and the spec that contains the last
        two."""
        generator = torch.Generator().manual_seed(self.seed)

        def leaf(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(dtype).requires_grad_()

        leaves = [
            leaf(self.queries, self.batch, self.heads, self.width),
            leaf(self.keys, self.batch, self.groups, self.width),
            leaf(self.keys, self.batch, self.groups, self.value_width),
        ]
        bias = leaf(*self.bias) if self.bias is not None else None
        sinks = leaf(self.heads) if self.sinks else None
        leaves.extend(extra for extra in (bias, sinks) if extra is not None)
        spec = AttentionSpec(
            scale=SCALE,
            mask=self.mask,
            bias=bias,
            position_bias=self._position_bias(),
            sinks=sinks,
            softcap=self.softcap,
        )
        return leaves, spec

    def _position_bias(self) -> PositionBias | None:
        if not self.positions:
            return None
        # Exact in float32 too, which operators may require for slopes.
        slopes = torch.tensor([(3 + n) / 16 for n in range(self.heads)], dtype=torch.float64)
        return PositionBias(slopes=slopes, root=self.positions == "root")


def run_kernel(
    kernel: AttentionKernel, leaves: list[Tensor], spec: AttentionSpec, dout: Tensor
) -> list[Tensor]:
    """Return output, log-sum-exp, gradients; without autograd, as kernels are called."""
    with torch.no_grad():
        q, k, v = (leaf.detach() for leaf in leaves[:3])
        bias = None if spec.bias is None else spec.bias.detach()
        sinks = None if spec.sinks is None else spec.sinks.detach()
        spec = attrs.evolve(spec, bias=bias, sinks=sinks)
        out, lse, saved = kernel.forward(q, k, v, spec)
        gradients = kernel.backward(dout, q, k, v, out, lse, saved, spec)
    return [out, lse, *gradients]


def run_reference(
    leaves: list[Tensor], spec: AttentionSpec, dout: Tensor, kept: Tensor | None = None
) -> list[Tensor]:
    out, lse = attend(*leaves[:3], spec, kept)
    gradients = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    zeros = (torch.zeros_like(leaf) for leaf in leaves)
    filled = (z if g is None else g for g, z in zip(gradients, zeros, strict=True))
    return [out.detach(), lse.detach(), *filled]


def assert_same(got: list[Tensor], want: list[Tensor], tolerance: float = TOLERANCE) -> None:
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        finite = theirs.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        assert torch.equal(ours[~finite], theirs[~finite].to(ours.dtype))
        largest = theirs[finite].abs().max().item() if finite.any() else 0.0
        difference = (ours.double() - theirs.double())[finite].abs()
        assert difference.numel() == 0 or difference.max().item() <= tolerance * max(largest, 1e-3)


def check(kernel: AttentionKernel, problem: Problem, tolerance: float = TOLERANCE) -> None:
    """Compare output, log-sum-exp and every gradient of one call, in float64."""
    leaves, spec = problem.draw()
    shape = (problem.queries, problem.batch, problem.heads, problem.value_width)
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = run_kernel(kernel, leaves, spec, dout)
    assert_same(got, run_reference(leaves, spec, dout), tolerance)


PROBLEMS = {
    "causal": Problem(),
    "multi-head": Problem(groups=4, heads_per_group=1),
    "multi-query": Problem(groups=1, heads_per_group=4),
    "not-causal": Problem(mask=Mask(causal=False)),
    "more-keys": Problem(keys=20),
    "more-queries": Problem(queries=20),
    "narrow-values": Problem(value_width=3),
    "wide-values": Problem(value_width=11),
    "narrow-values-in-a-window": Problem(value_width=3, mask=Mask(window=(4, 0))),
    "wide-values-in-a-window": Problem(value_width=11, mask=Mask(window=(4, 0))),
    "past-chunk": Problem(mask=Mask(query_start=12)),
    "future-chunk": Problem(mask=Mask(key_start=12)),
    "queries-ahead": Problem(mask=Mask(query_start=5)),
    "keys-ahead": Problem(mask=Mask(key_start=5)),
    "left-window": Problem(mask=Mask(window=(4, -1))),
    "both-windows": Problem(mask=Mask(causal=False, window=(2, 3))),
    "window-across-chunks": Problem(mask=Mask(window=(9, 0), query_start=6)),
    "window-longer-than-a-block": Problem(queries=600, keys=600, mask=Mask(window=(300, 0))),
    "documents": Problem(mask=Mask(document_ends=(5, 9))),
    "documents-across-chunks": Problem(mask=Mask(document_ends=(5, 9, 14), query_start=6)),
    "documents-and-window": Problem(mask=Mask(document_ends=(8,), window=(3, 0))),
    "bias": Problem(bias=(2, 4, 12, 12)),
    "bias-of-heads": Problem(bias=(4, 1, 12)),
    "bias-of-queries": Problem(bias=(12, 1)),
    "bias-over-several-blocks": Problem(queries=600, keys=300, bias=(1, 4, 600, 300)),
    "sinks": Problem(sinks=True),
    "sinks-and-blind-queries": Problem(sinks=True, mask=Mask(key_start=5)),
    "softcap": Problem(softcap=1.3),
    "softcap-bias-sinks-window": Problem(
        softcap=1.3, bias=(4, 12, 12), sinks=True, mask=Mask(window=(5, 0))
    ),
    "distances": Problem(positions="distance"),
    "roots-of-distances": Problem(positions="root"),
    "distances-across-chunks": Problem(
        positions="distance", mask=Mask(causal=False, query_start=12, key_start=3)
    ),
    "roots-in-a-window": Problem(positions="root", mask=Mask(window=(4, 0), query_start=2)),
    "distances-in-documents": Problem(positions="distance", mask=Mask(document_ends=(5, 9))),
    "distances-bias-sinks-softcap": Problem(
        positions="distance", bias=(4, 1, 12), sinks=True, softcap=1.3
    ),
    "distances-over-several-blocks": Problem(
        queries=300, keys=300, batch=1, positions="distance", mask=Mask(window=(280, 0))
    ),
    "softcap-over-several-blocks": Problem(queries=300, keys=300, softcap=0.9),
}
