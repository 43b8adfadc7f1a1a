"""The attention kernel against the formula: output, log-sum-exp and every gradient, in float64."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascend_run.plugin_api import AttentionSpec, Dropout, Mask
from ascend_run.plugins.cpu.attention import FusedCpuAttention

from .attention_reference import attend

TOLERANCE = 1e-10
SCALE = 0.37


@attrs.frozen(kw_only=True)
class Problem:
    """Shapes of one call and what it asks for."""

    queries: int = 12
    keys: int = 12
    batch: int = 2
    groups: int = 2
    heads_per_group: int = 2
    width: int = 8
    value_width: int = 8
    mask: Mask = attrs.field(factory=Mask)
    bias: tuple[int, ...] | None = None
    sinks: bool = False
    softcap: float | None = None
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.groups * self.heads_per_group

    def draw(self, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], AttentionSpec]:
        """q, k, v, then bias and sinks where asked for; and the spec that holds the last two."""
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
            scale=SCALE, mask=self.mask, bias=bias, sinks=sinks, softcap=self.softcap
        )
        return leaves, spec


def run_kernel(leaves: list[Tensor], spec: AttentionSpec, dout: Tensor) -> list[Tensor]:
    """Output, log-sum-exp, gradients; on tensors without autograd, as a kernel is called."""
    kernel = FusedCpuAttention()
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


def check(problem: Problem) -> None:
    leaves, spec = problem.draw()
    shape = (problem.queries, problem.batch, problem.heads, problem.value_width)
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_same(run_kernel(leaves, spec, dout), run_reference(leaves, spec, dout))


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
    "softcap-over-several-blocks": Problem(queries=300, keys=300, softcap=0.9),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_output_log_sum_exp_and_every_gradient_follow_the_formula(name: str) -> None:
    check(PROBLEMS[name])


lengths = st.integers(1, 20)
bounds = st.integers(-1, 6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_and_mask_follows_the_formula(data: Any) -> None:
    queries, keys, batch = (data.draw(lengths) for _ in range(3))
    groups, per_group = (data.draw(st.integers(1, 3)) for _ in range(2))
    shapes = st.sampled_from(
        [
            (queries, keys),
            (1, keys),
            (queries, 1),
            (batch, 1, queries, keys),
            (groups * per_group, 1, 1),
        ]
    )
    check(
        Problem(
            queries=queries,
            keys=keys,
            batch=batch,
            groups=groups,
            heads_per_group=per_group,
            width=data.draw(st.integers(1, 9)),
            value_width=data.draw(st.integers(1, 9)),
            mask=Mask(
                causal=data.draw(st.booleans()),
                window=data.draw(st.none() | st.tuples(bounds, bounds)),
                document_ends=data.draw(
                    st.none() | st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
                ),
                query_start=data.draw(lengths),
                key_start=data.draw(lengths),
            ),
            bias=data.draw(st.none() | shapes),
            sinks=data.draw(st.booleans()),
            softcap=data.draw(st.none() | st.just(1.1)),
            seed=data.draw(st.integers(0, 9)),
        )
    )


def test_dropout_is_replayed_in_backward_and_follows_the_formula() -> None:
    problem = Problem(queries=300, keys=300, batch=1, groups=1, width=4, value_width=300)
    (q, k, _), spec = problem.draw()
    # Values that are the unit vectors give the probabilities themselves, and so the mask.
    identity = torch.eye(300, dtype=torch.float64)[:, None, None, :].requires_grad_()
    leaves = [q, k, identity]
    dropped = attrs.evolve(spec, dropout=Dropout(probability=0.4, seed=5))
    dout = torch.randn(300, 1, 2, 300, dtype=torch.float64)
    got = run_kernel(leaves, dropped, dout)
    plain = run_kernel(leaves, spec, dout)[0]
    ratio = torch.where(plain == 0, 0.0, got[0] / plain).permute(1, 2, 0, 3)
    kept = ratio.round(decimals=6)
    assert set(kept.unique().tolist()) == {0.0, round(1 / 0.6, 6)}
    seen = plain.permute(1, 2, 0, 3) > 0
    assert abs((kept[seen] > 0).double().mean().item() - 0.6) < 0.01
    factors = (kept > 0).double() / 0.6
    assert_same(got, run_reference(leaves, dropped, dout, factors))
    other = attrs.evolve(spec, dropout=Dropout(probability=0.4, seed=6))
    assert not torch.equal(run_kernel(leaves, other, dout)[0], got[0])
    assert torch.equal(run_kernel(leaves, dropped, dout)[0], got[0])


def test_packed_documents_are_the_documents_one_by_one() -> None:
    lengths = (5, 1, 9)
    ends = (5, 6, 15)
    problem = Problem(queries=15, keys=15, batch=1, mask=Mask(document_ends=ends), sinks=True)
    leaves, spec = problem.draw()
    packed = [leaves[0].squeeze(1), leaves[1].squeeze(1), leaves[2].squeeze(1), leaves[3]]
    dout = torch.randn(15, 4, 8, dtype=torch.float64)
    out, lse, dq, dk, dv, dsinks = run_kernel(packed, spec, dout)
    assert out.shape == (15, 4, 8)
    assert lse.shape == (4, 15)
    total = torch.zeros_like(dsinks)
    alone = attrs.evolve(spec, mask=Mask())
    for end, length in zip(ends, lengths, strict=True):
        part = slice(end - length, end)
        pieces = [leaf[part] for leaf in leaves[:3]]
        want = run_reference([*pieces, leaves[3]], alone, dout[part].unsqueeze(1))
        got = [out[part].unsqueeze(1), lse[None, :, part]]
        got += [g[part].unsqueeze(1) for g in (dq, dk, dv)]
        assert_same(got, want[:5])
        total += want[5]
    assert_same([dsinks], [total])


def test_any_strides_are_taken() -> None:
    leaves, spec = Problem().draw()
    dout = torch.randn(12, 2, 4, 8, dtype=torch.float64)
    want = run_kernel(leaves, spec, dout)
    strided = [
        leaf.detach().permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for leaf in leaves
    ]
    spread = dout.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert_same(run_kernel(strided, spec, spread), want, 1e-14)
    expanded = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(12, 2, 4, 8)
    assert_same(run_kernel(leaves, spec, expanded), run_reference(leaves, spec, expanded))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
    ids=str,
)
@pytest.mark.parametrize("name", ["causal", "both-windows", "sinks", "softcap", "bias"])
def test_lower_precisions_keep_their_dtype_and_follow_within_their_rounding(
    dtype: torch.dtype, tolerance: float, name: str
) -> None:
    leaves, spec = PROBLEMS[name].draw(dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    extras = iter(exact[3:])
    exact_spec = attrs.evolve(
        spec,
        bias=None if spec.bias is None else next(extras),
        sinks=None if spec.sinks is None else next(extras),
    )
    dout = torch.randn(12, 2, 4, 8, dtype=torch.float64).to(dtype)
    got = run_kernel(leaves, spec, dout)
    assert [t.dtype for t in got] == [dtype, torch.float32, *(leaf.dtype for leaf in leaves)]
    assert_same(got, run_reference(exact, exact_spec, dout.double()), tolerance)
