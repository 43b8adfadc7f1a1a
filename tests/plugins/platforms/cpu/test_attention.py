"""The attention kernel against the formula: output, log-sum-exp and every gradient, in float64."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascend_run.plugin_api import Dropout, Mask
from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.testing.effects import count_operations
from tests.support.attention_problems import (
    PROBLEMS,
    Problem,
    assert_same,
    check,
    run_kernel,
    run_reference,
)

KERNEL = FusedCpuAttention()


@pytest.mark.parametrize("name", PROBLEMS)
def test_output_log_sum_exp_and_every_gradient_follow_the_formula(name: str) -> None:
    check(KERNEL, PROBLEMS[name])


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
        KERNEL,
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
            positions=data.draw(st.sampled_from(["", "distance", "root"])),
            sinks=data.draw(st.booleans()),
            softcap=data.draw(st.none() | st.just(1.1)),
            seed=data.draw(st.integers(0, 9)),
        ),
    )


def dropped_problem(problem: Problem, probability: float) -> tuple[list[Tensor], ...]:
    """Return the kernel's output, the formula's output for the positions that the kernel kept, and
    the dropout factors of visible positions."""
    (q, k, *_), spec = problem.draw()
    # With unit vectors as values the output is the probabilities, and so shows the mask.
    unit = torch.eye(problem.keys, dtype=torch.float64)[:, None, None]
    unit = unit.expand(-1, problem.batch, problem.groups, -1).contiguous().requires_grad_()
    leaves = [q, k, unit, *(x for x in (spec.bias, spec.sinks) if x is not None)]
    dropped = attrs.evolve(spec, dropout=Dropout(probability=probability, seed=5))
    shape = (problem.queries, problem.batch, problem.heads, problem.keys)
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = run_kernel(KERNEL, leaves, dropped, dout)
    plain = run_kernel(KERNEL, leaves, spec, dout)[0]
    ratio = torch.where(plain == 0, 0.0, got[0] / plain).permute(1, 2, 0, 3)
    seen = plain.permute(1, 2, 0, 3) > 0
    factors = (ratio > 0.5).double() / (1 - probability)
    return got, run_reference(leaves, dropped, dout, factors), [factors[seen]]


def test_dropout_is_replayed_in_backward_and_follows_the_formula() -> None:
    problem = Problem(queries=300, keys=300, batch=1, groups=1, width=4)
    got, wanted, (factors,) = dropped_problem(problem, 0.4)
    assert_same(got, wanted)
    assert abs((factors > 0).double().mean().item() - 0.6) < 0.01


def test_a_seed_drops_the_same_places_again_and_another_one_others() -> None:
    leaves, spec = Problem().draw()
    dout = torch.randn(12, 2, 4, 8, dtype=torch.float64)
    first, again, other = (
        run_kernel(
            KERNEL, leaves, attrs.evolve(spec, dropout=Dropout(probability=0.4, seed=n)), dout
        )
        for n in (5, 5, 6)
    )
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), probability=st.floats(0.05, 0.6))
def test_dropout_follows_the_formula_whatever_else_is_asked(data: Any, probability: float) -> None:
    problem = Problem(
        queries=data.draw(lengths),
        keys=data.draw(lengths),
        batch=data.draw(st.integers(1, 2)),
        groups=data.draw(st.integers(1, 3)),
        heads_per_group=data.draw(st.integers(1, 3)),
        mask=Mask(
            causal=data.draw(st.booleans()),
            window=data.draw(st.none() | st.tuples(bounds, bounds)),
            document_ends=data.draw(
                st.none() | st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple)
            ),
        ),
        positions=data.draw(st.sampled_from(["", "distance", "root"])),
        sinks=data.draw(st.booleans()),
        softcap=data.draw(st.none() | st.just(1.1)),
    )
    got, wanted, _ = dropped_problem(problem, probability)
    assert_same(got, wanted)


def test_packed_documents_are_the_documents_one_by_one() -> None:
    lengths = (5, 1, 9)
    ends = (5, 6, 15)
    problem = Problem(queries=15, keys=15, batch=1, mask=Mask(document_ends=ends), sinks=True)
    leaves, spec = problem.draw()
    packed = [leaves[0].squeeze(1), leaves[1].squeeze(1), leaves[2].squeeze(1), leaves[3]]
    dout = torch.randn(15, 4, 8, dtype=torch.float64)
    out, lse, dq, dk, dv, dsinks = run_kernel(KERNEL, packed, spec, dout)
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


def test_causal_squares_by_halves_follow_the_formula_in_few_calls() -> None:
    """A document of full squares, one with a remainder, and one too short to be halved."""
    mask = Mask(document_ends=(128, 331, 420))
    with count_operations() as seen:
        check(KERNEL, Problem(queries=420, keys=420, value_width=5, mask=mask), 1e-12)
    assert seen["_scaled_dot_product_flash_attention_for_cpu"] == 2 + 5 + 1


def test_any_strides_are_taken() -> None:
    leaves, spec = Problem().draw()
    dout = torch.randn(12, 2, 4, 8, dtype=torch.float64)
    want = run_kernel(KERNEL, leaves, spec, dout)
    strided = [
        leaf.detach().permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for leaf in leaves
    ]
    spread = dout.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert_same(run_kernel(KERNEL, strided, spec, spread), want, 1e-14)
    expanded = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(12, 2, 4, 8)
    assert_same(run_kernel(KERNEL, leaves, spec, expanded), run_reference(leaves, spec, expanded))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
    ids=str,
)
@pytest.mark.parametrize("name", ["causal", "both-windows", "sinks", "softcap", "bias"])
def test_lower_precisions_keep_their_dtype_and_match_within_rounding(
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
    got = run_kernel(KERNEL, leaves, spec, dout)
    assert [t.dtype for t in got] == [dtype, torch.float32, *(leaf.dtype for leaf in leaves)]
    assert_same(got, run_reference(exact, exact_spec, dout.double()), tolerance)
