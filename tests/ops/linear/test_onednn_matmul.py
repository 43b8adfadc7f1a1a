"""float32 matmuls by oneDNN against float64, alone and in grouped GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_run.ops.experts.grouped_matmul import LoopGroups
from ascend_run.ops.experts.rounded_groups import (
    FEWEST_ROWS,
    FEWEST_SUMMED,
    STEP,
    RoundedGroups,
    rounded,
)
from ascend_run.ops.linear.linear_cross_entropy import linear_cross_entropy
from ascend_run.ops.linear.matmul_blocks import BLOCK_BYTES, NARROWEST, block_bytes
from ascend_run.ops.linear.onednn_matmul import onednn_matmul
from benchmarks.live_storages import LiveStorages

M, K, N = 24, 40, 32
EPS = torch.finfo(torch.float32).eps


class Recorded(TorchDispatchMode):
    """Rows of each call of oneDNN's linear."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_near(got: Tensor, exact: Tensor, a: Tensor, b: Tensor) -> None:
    """Check float32 sums: at most a unit of eps of the terms' magnitudes for each term."""
    terms = a.double().abs() @ b.double().abs()
    assert got.dtype is torch.float32
    assert ((got.double() - exact).abs() <= a.shape[1] * EPS * terms).all()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (drawn(M, K), drawn(K, N)),
        (drawn(M, K), drawn(N, K).t()),
        (drawn(K, M).t(), drawn(K, N)),
        (drawn(M, 2 * K)[:, K:], drawn(K, 2 * N)[:, :N]),
        (drawn(2 * M, K)[::2], drawn(2 * N, K)[N:].t()),
        (drawn(M, 1).expand(M, K), drawn(1, N).expand(K, N)),
        (drawn(1, K), drawn(K, 1)),
        (drawn(M, 1), drawn(1, N)),
    ],
    ids=["plain", "matrix", "rows", "columns", "slices", "expanded", "vectors", "outer"],
)
def test_a_product_is_that_of_float64_in_every_layout(a: Tensor, b: Tensor) -> None:
    exact, out = a.double() @ b.double(), torch.empty(a.shape[0], b.shape[1])
    with Recorded() as recorded:
        got = onednn_matmul(a, b)
        assert onednn_matmul(a, b, out=out) is out
    assert len(recorded.rows) == 2
    assert torch.equal(got, out)
    assert_near(got, exact, a, b)


@pytest.mark.parametrize("shape", [(300, 7000), (7001, 300), (1500, 1400), (8, 2**18 + 3)], ids=str)
def test_a_large_product_is_written_to_out_block_by_block(shape: tuple[int, int]) -> None:
    """By the storages that exist at the same time; into a view whose rows are apart."""
    rows, columns = shape
    a, b, whole = drawn(rows, K), drawn(columns, K).t(), torch.zeros(rows, columns + 1)
    out = whole[:, :columns]
    with LiveStorages([a, b, whole]) as storages:
        there = storages.live
        assert onednn_matmul(a, b, out=out) is out
    held = storages.peak - there
    assert held == block_bytes(rows, columns) <= max(BLOCK_BYTES, 4 * NARROWEST * min(shape))
    assert held < out.nbytes / 3
    assert storages.live == there
    assert_near(out, a.double() @ b.double(), a, b)
    assert not whole[:, columns:].any()


def test_the_loss_holds_a_block_of_logits_beside_a_chunk() -> None:
    """One chunk of 24 MiB: its gradients are computed after it and are smaller than a block."""
    hidden, weight = drawn(768, K), drawn(8192, K)
    labels, mask = torch.arange(768) * 10, torch.ones(768)
    peaks = {}
    for matmul in (torch.mm, onednn_matmul):
        given = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        with LiveStorages([*given, labels, mask]) as storages:
            there = storages.live
            linear_cross_entropy(*given, labels, mask, matmul=matmul)
        peaks[matmul] = storages.peak - there
    logits, block = 768 * 8192 * 4, block_bytes(768, 8192)
    assert peaks[onednn_matmul] == pytest.approx(logits + block + hidden.nbytes, rel=0.001)
    assert peaks[onednn_matmul] <= 1.05 * peaks[torch.mm]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_are_multiplied_by_torch(dtype: torch.dtype) -> None:
    a, b = drawn(M, K).to(dtype), drawn(K, N).to(dtype)
    with Recorded() as recorded:
        assert torch.equal(onednn_matmul(a, b), a @ b)
    assert not recorded.rows


@pytest.mark.parametrize("shape", [(0, K, N), (M, 0, N), (M, K, 0)], ids=str)
def test_empty_operands_give_what_torch_gives(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    a, b = drawn(rows, inner), drawn(inner, columns)
    assert torch.equal(onednn_matmul(a, b), a @ b)


@pytest.mark.parametrize(
    ("a", "b"), [(drawn(M, K), drawn(N, K)), (drawn(K), drawn(K, N)), (drawn(M, K), None)], ids=str
)
def test_operands_that_do_not_fit_are_refused_as_by_torch(a: Tensor, b: Tensor | None) -> None:
    other = drawn(K, N).double() if b is None else b
    with pytest.raises(RuntimeError, match=r"mat1|matrix|dtype"):
        onednn_matmul(a, other)


def test_autograd_differentiates_it() -> None:
    a, b, dy = drawn(M, K).requires_grad_(), drawn(K, N).requires_grad_(), drawn(M, N)
    da, db = torch.autograd.grad(onednn_matmul(a, b), (a, b), dy)
    with torch.no_grad():
        assert_near(da, dy.double() @ b.double().t(), dy, b.t())
        assert_near(db, a.double().t() @ dy.double(), a.t(), dy)


COUNTS = {
    "some": (5, 0, FEWEST_ROWS, 100, STEP, 300, 1),
    "fewer than one step": (0, STEP - 5, 0),
    "none": (0, 0),
}


def grouped(
    counts: Sequence[int], spoil: Callable[[Tensor], None] = lambda _: None
) -> tuple[list[tuple[Tensor, Tensor, Tensor, Tensor]], list[int]]:
    """Return, of each kind of GEMM and each group, the result and exact result with both operands;
    and the rows of each call of oneDNN."""
    rows = sum(counts)
    x, dy, matrices = drawn(rows, K), drawn(rows, N), drawn(len(counts), N, K)
    spoil(x)
    spoil(dy)
    groups, total = RoundedGroups(counts, x.device), drawn(len(counts), N, K)
    before = total.clone()
    with Recorded() as recorded:
        y = groups.matmul(x, matrices.transpose(1, 2)).split([*counts])
        outer = groups.outer(dy, x)
        groups.add_outer(total, dy, x)
    found = []
    parts = zip(x.split([*counts]), dy.split([*counts]), matrices, strict=True)
    for group, (a, b, matrix) in enumerate(parts):
        product = b.double().t() @ a.double()
        found += [
            (y[group], a.double() @ matrix.double().t(), a, matrix.t()),
            (outer[group], product, b.t(), a),
            (total[group], before[group].double() + product, *_with_one_more(b, a, before[group])),
        ]
    return found, recorded.rows


def _with_one_more(b: Tensor, a: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return operands whose product's terms include those of a sum before it."""
    return torch.cat([b.t(), before.abs()], 1), torch.cat([a, torch.eye(a.shape[1])])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_each_group_is_multiplied_as_in_float64(counts: tuple[int, ...]) -> None:
    found, rows = grouped(counts)
    for got, exact, a, b in found:
        assert_near(got, exact, a, b)
    multiplied, summed = (
        sum(count >= fewest for count in counts) for fewest in (FEWEST_ROWS, FEWEST_SUMMED)
    )
    assert len(rows) == multiplied + 2 * summed


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_group_does_not_see_infinities_of_its_neighbours(value: float) -> None:
    counts = COUNTS["some"]
    start = sum(counts[:3])

    def spoil(rows: Tensor) -> None:
        rows[start : start + counts[3]] = value

    found, _ = grouped(counts, spoil)
    for index, (got, exact, a, b) in enumerate(found):
        if index // 3 == 3:
            assert not got.isfinite().any()
        else:
            assert_near(got, exact, a, b)


def test_groups_of_any_size_have_few_shapes() -> None:
    counts = range(FEWEST_ROWS, 1025)
    assert all(count <= rounded(count) <= max(count * 9 / 8, count + STEP - 1) for count in counts)
    assert len({rounded(count) for count in counts}) == 24


def test_other_dtypes_are_grouped_as_by_the_loop() -> None:
    counts = COUNTS["some"]
    x, dy, matrices = (
        tensor.double()
        for tensor in (drawn(sum(counts), K), drawn(sum(counts), N), drawn(len(counts), K, N))
    )
    results = []
    for kind in (LoopGroups, RoundedGroups):
        groups, total = kind(counts, x.device), torch.ones(len(counts), N, K).double()
        groups.add_outer(total, dy, x)
        results.append((groups.matmul(x, matrices), groups.outer(dy, x), total))
    assert all(map(torch.equal, *results))
