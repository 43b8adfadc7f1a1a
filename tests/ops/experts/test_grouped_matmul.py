"""Every backend of the grouped GEMM against one matmul per group."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascend_run.ops.experts.grouped_matmul import (
    GROUPS,
    Backend,
    PaddedGroups,
    choose,
    grouped_matmul,
    native_takes,
)
from benchmarks.live_storages import LiveStorages

BACKENDS: tuple[Backend, ...] = get_args(Backend)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
CPU = torch.device("cpu")


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def problem(counts: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [T, 8], matrices [X, 12, 8], and the gradient of the output [T, 12]."""
    total = sum(counts)
    return (
        draw(total, 8, dtype=dtype, seed=0),
        draw(len(counts), 12, 8, dtype=dtype, seed=1),
        draw(total, 12, dtype=dtype, seed=2),
    )


def by_hand(x: Tensor, matrices: Tensor, dy: Tensor, counts: list[int]) -> list[Tensor]:
    """Return the output and both gradients in float64, computed row by row."""
    x, matrices, dy = x.double(), matrices.double(), dy.double()
    group = [g for g, count in enumerate(counts) for _ in range(count)]
    y, dx, dmatrices = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(matrices)
    for row, g in enumerate(group):
        y[row] = matrices[g] @ x[row]
        dx[row] = matrices[g].t() @ dy[row]
        dmatrices[g] += torch.outer(dy[row], x[row])
    return [y, dx, dmatrices]


def check(counts: list[int], dtype: torch.dtype, backend: Backend) -> None:
    x, matrices, dy = problem(counts, dtype)
    x.requires_grad_()
    matrices.requires_grad_()
    y = grouped_matmul(x, matrices, counts, backend)
    y.backward(dy)
    expected = by_hand(x.detach(), matrices.detach(), dy, counts)
    for result, right in zip((y.detach(), x.grad, matrices.grad), expected, strict=True):
        assert result is not None
        assert result.dtype == dtype
        scale = right.abs().max().clamp(min=1e-300)
        assert ((result.double() - right).abs().max() / scale).item() <= TOLERANCE[dtype]


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("loop", torch.float64),
        ("bmm", torch.float64),
        ("loop", torch.float32),
        ("bmm", torch.float32),
        ("grouped_mm", torch.float32),
    ],
    ids=str,
)
def test_product_and_gradients_are_those_of_each_row(
    backend: Backend, dtype: torch.dtype, counts: list[int]
) -> None:
    check(counts, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_groups_matrix_receives_zeros(backend: Backend) -> None:
    counts = [3, 0, 5, 0]
    x, matrices, dy = problem(counts, torch.float32)
    matrices.requires_grad_()
    grouped_matmul(x, matrices, counts, backend).backward(dy)
    assert matrices.grad is not None
    assert not matrices.grad[[1, 3]].any()
    assert matrices.grad[[0, 2]].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_not_contiguous_is_accepted(backend: Backend) -> None:
    counts = [4, 4]
    x, matrices, _ = problem(counts, torch.float32)
    x.requires_grad_()
    grouped_matmul(x, matrices, counts, backend).sum().backward()  # a broadcast gradient
    expected = by_hand(x.detach(), matrices, torch.ones(8, 12), counts)[1]
    torch.testing.assert_close(x.grad, expected.float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_is_taken_for_what_needs_none(backend: Backend) -> None:
    counts = [4, 4]
    x, matrices, dy = problem(counts, torch.float32)
    x.requires_grad_()
    grouped_matmul(x, matrices, counts, backend).backward(dy)
    assert matrices.grad is None


@pytest.mark.parametrize("counts", [[4, 4, 4], [5, 0, 7]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_groups_product_exists_at_most_while_they_are_added(
    backend: Backend, counts: list[int]
) -> None:
    """Of bfloat16 rows to a float32 sum, by the storages that exist at the same time."""
    x = draw(sum(counts), 8, dtype=torch.bfloat16, seed=0)
    dy = draw(sum(counts), 16, dtype=torch.bfloat16, seed=1)
    before = draw(3, 16, 8, dtype=torch.float32, seed=2)
    total, groups = before.clone(), GROUPS[backend](counts, CPU)
    with LiveStorages([x, dy, total]) as storages:
        there = storages.live
        groups.add_outer(total, dy, x)
    assert storages.peak - there <= 16 * 8 * torch.bfloat16.itemsize
    assert storages.live == there
    product = by_hand(x, torch.zeros(3, 16, 8), dy, counts)[2]
    error = (total - before.double() - product).abs().max() / product.abs().max()
    assert float(error) <= torch.finfo(torch.bfloat16).eps
    assert torch.equal(total[1], before[1]) is (counts[1] == 0)


def test_equal_groups_are_batched_without_a_copy() -> None:
    groups = GROUPS["bmm"]([4, 4, 4], CPU)
    assert isinstance(groups, PaddedGroups)
    x = torch.randn(12, 5)
    assert groups._pad(x).data_ptr() == x.data_ptr()


def counts_with(rows: int, largest: int, groups: int = 64) -> list[int]:
    """Return counts with this mean and this largest one."""
    share, more = divmod(rows * groups - largest, groups - 1)
    return [*[share] * (groups - 1 - more), *[share + 1] * more, largest]


@pytest.mark.parametrize(
    ("dtype", "rows", "most", "beyond"),
    [
        (torch.bfloat16, 16, 32, "grouped_mm"),
        (torch.float16, 4, 8, "grouped_mm"),
        (torch.bfloat16, 17, 21, "grouped_mm"),
        (torch.bfloat16, 32, 40, "grouped_mm"),
        (torch.bfloat16, 33, 33, "grouped_mm"),
        (torch.bfloat16, 256, 256, "grouped_mm"),
        (torch.float32, 16, 20, "loop"),
    ],
    ids=str,
)
def test_a_batched_gemm_is_chosen_up_to_the_measured_padding(
    dtype: torch.dtype, rows: int, most: int, beyond: Backend
) -> None:
    for largest, expected in ((most, "bmm"), (most + 1, beyond)):
        counts = counts_with(rows, largest)
        assert (sum(counts), max(counts)) == (64 * rows, largest)
        assert choose(counts, CPU, dtype, (512, 256)) == expected
    few = counts_with(rows, rows, groups=15)
    assert choose(few, CPU, dtype, (512, 256)) == beyond


@pytest.mark.parametrize("rows", [17, 32, 128])
def test_many_rows_in_float32_are_multiplied_group_by_group(rows: int) -> None:
    assert choose([rows] * 64, CPU, torch.float32, (512, 256)) == "loop"
    assert choose([8] * 64, CPU, torch.float64, (512, 256)) == "loop"


BALANCED, SKEWED = [32] * 64, [1024] + [16] * 63


@pytest.mark.parametrize(
    ("counts", "device", "dtype", "widths", "expected"),
    [
        (BALANCED, "cpu", torch.bfloat16, (512, 256), "bmm"),
        (SKEWED, "cpu", torch.bfloat16, (512, 256), "grouped_mm"),
        ([256] * 8, "cpu", torch.bfloat16, (512, 1024), "grouped_mm"),
        (SKEWED, "cpu", torch.bfloat16, (512, 250), "loop"),
        (BALANCED, "cpu", torch.float32, (512, 256), "loop"),
        (BALANCED, "cpu", torch.float64, (512, 256), "loop"),
        ([0, 0], "cpu", torch.bfloat16, (512, 256), "loop"),
        (SKEWED, "cuda", torch.bfloat16, (512, 256), "grouped_mm"),
        (SKEWED, "cuda", torch.bfloat16, (512, 250), "loop"),
        (BALANCED, "cuda", torch.float32, (512, 256), "bmm"),
        (SKEWED, "cuda", torch.float32, (512, 256), "loop"),
        (SKEWED, "meta", torch.bfloat16, (512, 256), "loop"),
    ],
)
def test_the_backend_follows_device_dtype_and_balance(
    counts: list[int],
    device: str,
    dtype: torch.dtype,
    widths: tuple[int, ...],
    expected: Backend,
) -> None:
    assert choose(counts, torch.device(device), dtype, widths) == expected


def test_what_torch_cannot_group_is_never_chosen() -> None:
    assert not native_takes("cpu", torch.float64, (8, 8))
    assert not native_takes("cuda", torch.bfloat16, (12, 8))
    assert not native_takes("cpu", torch.bfloat16, (12, 8))
    assert not native_takes("cpu", torch.float32, (6, 8))
