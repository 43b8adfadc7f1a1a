"""The NPU's matmuls of linears against the torch implementations, on several ranks."""

from __future__ import annotations

import pytest
import torch

from ascend_run.ops.linear import weight_gradient
from ascend_run.plugins.platforms.npu.forms import FORMS, linear
from ascend_run.plugins.platforms.npu.proof.recording import recorded_calls
from ascend_run.testing.pool import GlooPool

from . import linear_jobs as jobs

PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@pytest.mark.parametrize("transposed", [False, True], ids=["matrix", "transposed"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_matmul_with_its_collective_is_one_operator(
    gloo_pool: GlooPool, name: str, transposed: bool
) -> None:
    for apart, seen in gloo_pool.run(jobs.product, 2, name, 256, jobs.ROWS, transposed):
        assert apart < 1e-13
        assert seen == set(FORMS[name].calls)


@pytest.mark.parametrize(
    ("name", "inner", "rows", "ranks"),
    [
        ("all_gather_matmul", 255, 6, 2),
        ("matmul_reduce_scatter", 255, 6, 2),
        ("all_gather_matmul", 256, 6, 3),
        ("matmul_all_reduce", 256, 6, 3),
        ("matmul_all_reduce", 256, 0, 2),
    ],
)
def test_what_the_operators_do_not_take_is_the_torch_form(
    gloo_pool: GlooPool, name: str, inner: int, rows: int, ranks: int
) -> None:
    for apart, seen in gloo_pool.run(jobs.product, ranks, name, inner, rows, False):
        assert apart < 1e-13
        assert seen == set()


@pytest.mark.parametrize(
    ("dtype", "wide", "rows", "fused"),
    [
        (torch.bfloat16, torch.float32, 6, True),
        (torch.float16, torch.float32, 6, True),
        (torch.float32, torch.float32, 6, False),
        (torch.bfloat16, torch.bfloat16, 6, False),
        (torch.bfloat16, torch.float32, 0, False),
    ],
    ids=str,
)
def test_a_gradient_is_added_by_the_grouped_product_with_one_group(
    dtype: torch.dtype, wide: torch.dtype, rows: int, fused: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, n, generator=generator).to(dtype) for n in (5, 3))
    got, want = (torch.full((5, 3), 0.5, dtype=wide) for _ in range(2))
    with recorded_calls() as recorder:
        linear.matmul_add_fp32(got, a, b)
    weight_gradient.matmul_add_fp32(want, a, b)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 if fused else 0)
    seen = tuple(call.operator for call in recorder.calls)
    assert seen == (FORMS["matmul_add_fp32"].calls if fused else ())
