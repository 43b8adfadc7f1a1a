"""Permutations of tokens against a loop over tokens and their experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ascend_run.ops.experts.token_copies import (
    FUSED,
    INDEXED,
    Permutation,
    copies_of,
    swap_chunks,
    transposed,
)
from ascend_run.testing.effects import count_operations

T, H, X = 7, 5, 6
BOTH = pytest.mark.parametrize("permutation", [INDEXED, FUSED], ids=["indexed", "fused"])


def routing(kind: str, topk: int) -> Tensor:
    """Return a map [T, X] with ``topk`` experts of each token."""
    chosen = torch.zeros(T, X, dtype=torch.bool)
    generator = torch.Generator().manual_seed(3)
    for token in range(T):
        experts = torch.randperm(X - 1, generator=generator)[:topk]  # the last one stays empty
        chosen[token, experts if kind == "spread" else torch.arange(topk)] = True
    return chosen


def by_hand(chosen: Tensor) -> list[tuple[int, int]]:
    """Return (expert, token) of each row."""
    return [(x, t) for x in range(X) for t in range(T) if chosen[t, x]]


@BOTH
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("kind", ["spread", "all on the first"])
def test_rows_and_sums_and_their_gradients_are_those_of_each_copy(
    permutation: Permutation, kind: str, topk: int
) -> None:
    chosen = routing(kind, topk)
    pairs = by_hand(chosen)
    copies = copies_of(chosen, topk)
    tokens = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(T, X, dtype=torch.float64, requires_grad=True)
    rows = permutation.permute(tokens, copies)
    row_probs = permutation.permute_probs(probs, copies)
    scale = torch.randn(len(pairs), H, dtype=torch.float64, requires_grad=True)
    out = permutation.unpermute(rows * scale * row_probs[:, None], copies)

    assert torch.equal(rows, torch.stack([tokens[t] for _, t in pairs]))
    assert torch.equal(row_probs, torch.stack([probs[t, x] for x, t in pairs]))
    parts: list[list[Tensor]] = [[] for _ in range(T)]
    for row, (x, t) in enumerate(pairs):
        parts[t].append(tokens[t] * scale[row] * probs[t, x])
    expected = torch.stack([torch.stack(part).sum(0) for part in parts])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    dy = torch.randn_like(out)
    leaves = (tokens, probs, scale)
    for found, right in zip(
        torch.autograd.grad(out, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_the_fused_permutation_adds_nothing_by_index_nor_copies_twice() -> None:
    chosen = routing("spread", 3)
    copies = copies_of(chosen, 3)
    tokens = torch.randn(T, H, requires_grad=True)
    probs = torch.rand(T, X, requires_grad=True)
    with count_operations() as seen:
        rows = FUSED.permute(tokens, copies)
        weighted = rows * FUSED.permute_probs(probs, copies)[:, None]
        FUSED.unpermute(weighted, copies).sum().backward()
    added = {name for name in seen if "index_add" in name or "scatter" in name or "put" in name}
    assert not added
    gathers = {"index_select": 3, "_embedding_bag_forward_only": 2}  # of tokens, probs and sums
    assert {name: seen[name] for name in gathers} == gathers
    assert seen["_local_scalar_dense"] == seen["nonzero"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_of_lower_precision_are_rounded_once(dtype: torch.dtype) -> None:
    copies = copies_of(routing("spread", 4), 4)
    rows = torch.randn(T * 4, H, dtype=torch.float64).to(dtype)
    out = FUSED.unpermute(rows, copies)
    exact = INDEXED.unpermute(rows.double(), copies)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_no_tokens_have_no_rows() -> None:
    copies = copies_of(torch.zeros(0, X, dtype=torch.bool), 2)
    tokens = torch.randn(0, H, requires_grad=True)
    out = FUSED.unpermute(FUSED.permute(tokens, copies), copies)
    out.sum().backward()
    assert out.shape == (0, H)
    assert tokens.grad is not None


@pytest.mark.parametrize("shape", [(H,), ()], ids=["rows", "probs"])
@pytest.mark.parametrize("sizes", [[[2, 0, 3], [1, 4, 0]], [[0], [2], [1]], [[0, 0]]], ids=str)
def test_chunks_of_two_orders_are_swapped(sizes: list[list[int]], shape: tuple[int, ...]) -> None:
    labels = [
        (p, q) for p, row in enumerate(sizes) for q, size in enumerate(row) for _ in range(size)
    ]
    order = sorted(range(len(labels)), key=lambda row: labels[row][::-1])
    rows, dy = (torch.randn(len(labels), *shape, dtype=torch.float64) for _ in range(2))
    moved = swap_chunks(rows.requires_grad_(), sizes)
    assert torch.equal(moved, rows[order])
    assert torch.equal(swap_chunks(moved, transposed(sizes)), rows)
    (found,) = torch.autograd.grad(moved, rows, dy)
    assert torch.equal(found[order], dy)
