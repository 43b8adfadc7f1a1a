"""The NPU's attention code on reference operators: output, log-sum-exp and every gradient."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascend_run.plugin_api import AttentionSpec, Dropout, Mask, PlatformError
from ascend_run.plugins.npu import operators
from ascend_run.plugins.npu.attention import FusedNpuAttention
from tests.support.attention_problems import (
    PROBLEMS,
    Problem,
    assert_same,
    check,
    run_kernel,
    run_reference,
)

KERNEL = FusedNpuAttention()
TAKEN = {
    name: problem
    for name, problem in PROBLEMS.items()
    if problem.bias is None and problem.softcap is None
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the forward operator was asked for."""
    seen: list[dict[str, Any]] = []
    plain = operators.fusion_attention

    def watch(*tensors: torch.Tensor, **options: Any) -> operators.AttentionOut:
        seen.append(options)
        return plain(*tensors, **options)

    monkeypatch.setattr(operators, "fusion_attention", watch)
    return seen


@pytest.mark.parametrize("name", TAKEN)
def test_output_log_sum_exp_and_every_gradient_follow_the_formula(name: str) -> None:
    check(KERNEL, TAKEN[name])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_shape_and_mask_follows_the_formula(data: Any) -> None:
    lengths, bounds = st.integers(1, 20), st.integers(-1, 6)
    ends = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
    check(
        KERNEL,
        Problem(
            queries=data.draw(lengths),
            keys=data.draw(lengths),
            batch=data.draw(st.integers(1, 2)),
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
    assert [call["layout"] for call in calls] == ["TND", "TND"]
    assert calls[0]["sparsity"].query_ends == ends


def test_a_band_of_any_length_is_one_call(calls: list[Any]) -> None:
    check(KERNEL, PROBLEMS["window-longer-than-a-block"])
    assert [call["sparsity"].mode for call in calls] == [operators.BAND]


def test_a_merged_log_sum_exp_gives_the_gradients_of_the_whole() -> None:
    """As a ring does: two halves of the keys, merged, then each half's gradients."""
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias", torch.zeros(1)),
        ("softcap", 1.0),
        ("dropout", Dropout(probability=0.1, seed=0)),
    ],
)
def test_what_it_does_not_declare_it_refuses(name: str, value: Any) -> None:
    assert not getattr(KERNEL.features, name)
    q = torch.ones(2, 1, 1, 4)
    spec = attrs.evolve(AttentionSpec(scale=1.0), **{name: value})
    with pytest.raises(PlatformError, match=f"no {name}.*--platform cpu"):
        KERNEL.forward(q, q, q, spec)
