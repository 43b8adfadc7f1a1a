"""The NPU's attention code on reference operators: output, log-sum-exp and every gradient."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascend_run.ops.attention import blockwise_attention
from ascend_run.plugin_api import Dropout, Mask
from ascend_run.plugins.platforms.npu import operators
from ascend_run.plugins.platforms.npu.attention import FusedNpuAttention
from tests.support.attention_problems import (
    PROBLEMS,
    TOLERANCE,
    Problem,
    assert_same,
    check,
    run_kernel,
    run_reference,
)

KERNEL = FusedNpuAttention()
KERNELS = {
    **{f"v1 {layout}": FusedNpuAttention(layout=layout) for layout in operators.LAYOUTS},
    "v1, whole masks": FusedNpuAttention(masks="whole"),
    "v2": FusedNpuAttention(version=2),
    "v2 BNSD": FusedNpuAttention(version=2, layout="BNSD"),
}
KERNELS_OFTEN = ("v1 SBH", "v2")
"""Run on every problem; the others only where they differ."""
FEW = ("multi-query", "window-across-chunks", "wide-values", "bias", "distances", "documents")
CASES = [
    (kernel, name) for kernel in KERNELS for name in (PROBLEMS if kernel in KERNELS_OFTEN else FEW)
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[operators.Call]:
    """Record the arguments of the forward operator."""
    seen: list[operators.Call] = []
    plain = operators.fusion_attention

    def watch(*tensors_and_call: Any) -> operators.AttentionOut:
        seen.append(tensors_and_call[-1])
        return plain(*tensors_and_call)

    monkeypatch.setattr(operators, "fusion_attention", watch)
    return seen


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kernel", "name"), CASES)
def test_output_log_sum_exp_and_every_gradient_follow_the_formula(kernel: str, name: str) -> None:
    check(KERNELS[kernel], PROBLEMS[name])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_shape_and_mask_follows_the_formula(data: Any) -> None:
    lengths, bounds = st.integers(1, 20), st.integers(-1, 6)
    ends = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
    queries, keys = data.draw(lengths), data.draw(lengths)
    check(
        KERNELS[data.draw(st.sampled_from([*KERNELS]))],
        Problem(
            queries=queries,
            keys=keys,
            batch=data.draw(st.integers(1, 2)),
            bias=data.draw(st.none() | st.sampled_from([(queries, keys), (1, keys), (queries, 1)])),
            positions=data.draw(st.sampled_from(["", "distance", "root"])),
            groups=data.draw(st.integers(1, 3)),
            heads_per_group=data.draw(st.integers(1, 3)),
            width=data.draw(st.integers(1, 9)),
            value_width=data.draw(st.integers(1, 9)),
            mask=Mask(
                causal=data.draw(st.booleans()),
                window=data.draw(st.none() | st.tuples(bounds, bounds)),
                document_ends=data.draw(st.none() | ends),
                query_start=data.draw(lengths),
                key_start=data.draw(lengths),
            ),
            sinks=data.draw(st.booleans()),
            seed=data.draw(st.integers(0, 9)),
        ),
    )


def test_documents_of_one_sequence_are_one_call_and_what_they_are_alone(calls: list[Any]) -> None:
    ends = (5, 6, 15)
    problem = Problem(
        queries=15, keys=15, batch=1, value_width=5, mask=Mask(document_ends=ends), sinks=True
    )
    leaves, spec = problem.draw()
    dout = torch.randn(15, 1, 4, 5, dtype=torch.float64)
    want = run_reference(leaves, spec, dout)
    assert_same(run_kernel(KERNEL, leaves, spec, dout), want)
    packed = [*(leaf.squeeze(1) for leaf in leaves[:3]), leaves[3]]
    out, lse, dq, dk, dv, dsinks = run_kernel(KERNEL, packed, spec, dout.squeeze(1))
    restored = [out.unsqueeze(1), lse.unsqueeze(0), *(g.unsqueeze(1) for g in (dq, dk, dv)), dsinks]
    assert_same(restored, want)
    assert [call.layout for call in calls] == ["TND", "TND"]
    assert calls[0].sparsity.query_ends == ends


def test_documents_beside_a_bias_are_not_one_packed_call(calls: list[Any]) -> None:
    documents = Mask(document_ends=(5, 6, 15))
    check(KERNEL, Problem(queries=15, keys=15, batch=1, bias=(15, 15), mask=documents))
    assert calls
    assert all(call.layout != "TND" for call in calls)


def test_a_band_of_any_length_is_one_call(calls: list[Any]) -> None:
    check(KERNEL, PROBLEMS["window-longer-than-a-block"])
    assert [call.sparsity.mode for call in calls] == [operators.BAND]


def test_a_merged_log_sum_exp_gives_the_gradients_of_the_whole() -> None:
    """As in a ring: two halves of the keys, merged, then each half's gradients."""
    problem = Problem(queries=8, keys=16, mask=Mask(causal=False))
    leaves, spec = problem.draw()
    dout = torch.randn(8, 2, 4, 8, dtype=torch.float64)
    out, lse, dq, dk, dv = run_reference(leaves, spec, dout)
    q, k, v = (leaf.detach() for leaf in leaves)
    parts = [
        KERNEL.backward(dout, q, k[half], v[half], out, lse, (), spec)
        for half in (slice(0, 8), slice(8, 16))
    ]
    assert_same([parts[0][0] + parts[1][0]], [dq])
    assert_same([torch.cat([part[i] for part in parts]) for i in (1, 2)], [dk, dv])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_float32_and_dtypes_are_kept(dtype: torch.dtype) -> None:
    leaves, spec = PROBLEMS["causal"].draw(dtype)
    dout = torch.randn(12, 2, 4, 8).to(dtype)
    got = run_kernel(KERNEL, leaves, spec, dout)
    assert [t.dtype for t in got] == [dtype, torch.float32, dtype, dtype, dtype]


def test_a_soft_cap_runs_without_the_operator(calls: list[Any]) -> None:
    check(KERNEL, PROBLEMS["softcap"])
    assert not calls


@pytest.mark.parametrize("kernel", ["v1 SBH", "v1 BNSD", "v2"])
@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask(window=(5, 0)), Mask(document_ends=(7, 12, 20)), None],
    ids=["causal", "window", "documents", "of-every-pair"],
)
def test_dropout_is_the_operators_and_is_replayed(kernel: str, mask: Mask | None) -> None:
    """With unit vectors as values the output is the probabilities, and so shows the mask."""
    size = 40
    problem = Problem(queries=size, keys=size, batch=1, width=4, value_width=size)
    (q, k, _), spec = problem.draw()
    if mask is None:
        hidden = torch.arange(size**2).reshape(size, size) % 7 < 3
        hidden[11] = True
        bias = torch.zeros(size, size, dtype=torch.float64).masked_fill(hidden, -torch.inf)
        spec = attrs.evolve(spec, bias=bias, bias_requires_grad=False)
    spec = attrs.evolve(spec, mask=mask or Mask(causal=False))
    identity = torch.eye(size, dtype=torch.float64)[:, None, None, :].expand(-1, 1, 2, -1)
    leaves = [q, k, identity.clone().requires_grad_()]
    dropped = attrs.evolve(spec, dropout=Dropout(probability=0.4, seed=5))
    dout = torch.randn(size, 1, 4, size, dtype=torch.float64)
    before = torch.get_rng_state()
    got = run_kernel(KERNELS[kernel], leaves, dropped, dout)
    assert torch.equal(torch.get_rng_state(), before), "the generator is as it was"
    plain = run_kernel(KERNELS[kernel], leaves, spec, dout)[0]
    kept = torch.where(plain == 0, 0.0, got[0] / plain).permute(1, 2, 0, 3)
    seen = plain.permute(1, 2, 0, 3) > 0
    assert set(kept.round(decimals=6).unique().tolist()) == {0.0, round(1 / 0.6, 6)}
    assert abs((kept[seen] > 0).double().mean().item() - 0.6) < 0.1
    assert_same(got, run_reference(leaves, dropped, dout, (kept > 0).double() / 0.6))
    torch.rand(3)  # other draws do not change it
    assert torch.equal(run_kernel(KERNELS[kernel], leaves, dropped, dout)[0], got[0])
    other = attrs.evolve(spec, dropout=Dropout(probability=0.4, seed=6))
    assert not torch.equal(run_kernel(KERNELS[kernel], leaves, other, dout)[0], got[0])


@pytest.mark.parametrize("change", [{"bias": torch.zeros(1, dtype=torch.float64)}, {}], ids=str)
def test_what_dropout_leaves_to_torch_is_dropped_all_the_same(
    change: dict[str, Any], calls: list[Any]
) -> None:
    (q, k, v), spec = Problem().draw()
    probability = 0.5 if change else 1.0
    dropped = attrs.evolve(spec, dropout=Dropout(probability=probability, seed=3), **change)
    out = KERNEL.forward(q.detach(), k.detach(), v.detach(), dropped).out
    assert not calls
    assert (
        (out == 0).all()
        if probability == 1.0
        else not torch.allclose(out, KERNEL.forward(q.detach(), k.detach(), v.detach(), spec).out)
    )


def test_slopes_and_starts_are_given_to_the_second_version_as_they_are(calls: list[Any]) -> None:
    problem = Problem(positions="root", mask=Mask(query_start=7, key_start=7))
    check(KERNELS["v2"], problem)
    (call,) = calls
    assert call.bias.kind == operators.ROOT_SLOPES
    assert (call.bias.query_start, call.bias.key_start) == (7, 7)
    assert call.bias.pse.shape == (4,)


@pytest.mark.parametrize(("kernel", "kind"), [("v1 SBH", 1), ("v2", 0)])
def test_other_biases_come_before_or_after_the_scale(
    kernel: str, kind: int, calls: list[Any]
) -> None:
    check(KERNELS[kernel], PROBLEMS["bias"])
    assert [call.bias.kind for call in calls] == [kind]


@pytest.mark.parametrize("kernel", ["v1 SBH", "v2"])
def test_a_mask_that_is_given_as_a_bias_is_the_operators_alone(
    kernel: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No blockwise pass for a gradient that is not required, with dropout neither."""
    leaves, spec = attrs.evolve(PROBLEMS["bias"], sinks=True).draw()
    dout = torch.randn(12, 2, 4, 8, dtype=torch.float64)
    spec = attrs.evolve(spec, bias_requires_grad=False)
    del leaves[3]
    monkeypatch.setattr(blockwise_attention, "backward", None)
    monkeypatch.setattr(blockwise_attention, "bias_gradient", None)
    assert_same(run_kernel(KERNELS[kernel], leaves, spec, dout), run_reference(leaves, spec, dout))
    dropped = attrs.evolve(spec, dropout=Dropout(probability=0.3, seed=7))
    run_kernel(KERNELS[kernel], leaves, dropped, dout)
    assert len(calls) == 2


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("change", "scale"),
    [({}, 0.37), ({"sinks": True}, 0.37), ({"positions": "distance"}, 0.1), ({}, 3.0)],
    ids=str,
)
def test_a_bias_that_hides_every_key_of_a_query_leaves_nothing_of_it(
    kernel: str, dtype: torch.dtype, change: dict[str, Any], scale: float
) -> None:
    """As in the blocks of a ring with any mask; float64 tests the bias's gradient too."""
    leaves, spec = attrs.evolve(PROBLEMS["bias"], **change).draw(dtype)
    bias = leaves[3].detach().clone()
    bias[..., ::2, ::3] = bias[..., 4, :] = -torch.inf
    learned = dtype is torch.float64
    spec = attrs.evolve(spec, bias=bias, bias_requires_grad=learned, scale=scale)
    exact = [leaf.detach().double() for leaf in leaves]
    exact[3] = bias.double()
    wide = attrs.evolve(spec, bias=exact[3], sinks=exact[4] if spec.sinks is not None else None)
    wanted = [leaf.requires_grad_() for i, leaf in enumerate(exact) if i != 3 or learned]
    dout = torch.randn(12, 2, 4, 8, dtype=dtype)
    want = run_reference(wanted, wide, dout.double())
    got = run_kernel(KERNELS[kernel], leaves, spec, dout)
    tolerance = {torch.float64: TOLERANCE, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    assert_same([x.double() for x in got], want, tolerance)


def test_the_first_version_gets_the_last_rows_of_a_long_position_bias(
    calls: list[Any],
) -> None:
    (q, k, v), spec = Problem(
        queries=1100, keys=1100, batch=1, groups=1, width=2, value_width=2, positions="distance"
    ).draw()
    dout = torch.randn(1100, 1, 2, 2, dtype=torch.float64)
    got = run_kernel(KERNEL, [q, k, v], spec, dout)
    assert calls[0].bias.pse.shape == (1, 2, 1024, 1100)
    assert_same(got, run_kernel(KERNELS["v2"], [q, k, v], spec, dout))


def test_all_layers_and_calls_share_one_mask_of_4_mebibytes() -> None:
    """For any lengths and number of calls."""
    kernel = FusedNpuAttention()
    for queries in (3, 12, 40):
        for mask in (Mask(), Mask(window=(4, 0)), Mask(document_ends=(2,))):
            check(kernel, Problem(queries=queries, keys=queries, batch=1, mask=mask))
    assert sum(mask.nbytes for mask in kernel.masks.tensors) == 4 * 2**20


def test_whole_masks_are_made_once_for_each_shape() -> None:
    kernel = FusedNpuAttention(masks="whole")
    for _ in range(3):
        check(kernel, Problem(queries=12, keys=12))
        check(kernel, Problem(queries=6, keys=6))
    assert [mask.shape for mask in kernel.masks.tensors] == [(12, 12), (6, 6)]


@pytest.mark.parametrize("kernel", ["v1 SBH", "v2"])
@pytest.mark.parametrize("name", ["causal", "bias", "distances"])
def test_float32_follows_the_formula_to_its_rounding(kernel: str, name: str) -> None:
    leaves, spec = PROBLEMS[name].draw(torch.float32)
    dout = torch.randn(12, 2, 4, 8, generator=torch.Generator().manual_seed(3))
    got = run_kernel(KERNELS[kernel], leaves, spec, dout)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    bias = exact[3] if spec.bias is not None else None
    want = run_reference(exact, attrs.evolve(spec, bias=bias), dout.double())
    assert_same(got, want, 1e-6)
