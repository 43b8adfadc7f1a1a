"""MoE permutation against loops over tokens and experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ascend_run.ops.experts.moe_permutation import moe_token_permute, moe_token_unpermute
from tests.ops.elementwise import elementwise as check

EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])
ROWS = [(t, k) for e in range(3) for t in range(5) for k in range(2) if EXPERTS[t, k] == e]
"""(token, copy) of each row, sorted by expert, then by token."""


def test_tokens_stand_in_the_order_of_their_experts() -> None:
    tokens = check.draw(5, 4, seed=0)
    check.assert_equal_to_formula(
        lambda x: moe_token_permute(x, EXPERTS)[0],
        lambda x: torch.stack([x[token] for token, _ in ROWS]),
        [tokens],
    )
    _, places = moe_token_permute(tokens, EXPERTS)
    assert places.dtype is torch.int32
    assert places.tolist() == [ROWS.index((t, k)) for t in range(5) for k in range(2)]


@pytest.mark.parametrize("kept", [6, -4, 1], ids=str)
def test_only_the_first_rows_are_kept(kept: int) -> None:
    check.assert_equal_to_formula(
        lambda x: moe_token_permute(x, EXPERTS, num_out_tokens=kept)[0],
        lambda x: torch.stack([x[token] for token, _ in ROWS[:kept]]),
        [check.draw(5, 4, seed=0)],
    )


@pytest.mark.parametrize("kept", [10, 6, 0], ids=str)
def test_copies_come_back_weighted(kept: int) -> None:
    """Dropped copies count as zeros."""
    _, places = moe_token_permute(torch.zeros(5, 1), EXPERTS)

    def formula(rows: Tensor, probs: Tensor) -> Tensor:
        sums = [torch.zeros(4, dtype=torch.float64) + 0 * probs.sum() for _ in range(5)]
        for row, (token, copy) in enumerate(ROWS[:kept]):
            sums[token] = sums[token] + probs[token, copy] * rows[row]
        return torch.stack(sums) + 0 * rows.sum()

    leaves = [check.draw(kept, 4, seed=0), check.draw(5, 2, seed=1)]
    check.assert_equal_to_formula(
        lambda rows, probs: moe_token_unpermute(rows, places, probs), formula, leaves
    )


def test_without_weights_every_row_is_a_token() -> None:
    places = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    check.assert_equal_to_formula(
        lambda rows: moe_token_unpermute(rows, places),
        lambda rows: torch.stack([rows[i] for i in (2, 0, 3, 1)]),
        [check.draw(4, 3, seed=0)],
    )


def test_one_expert_a_token_needs_no_second_axis() -> None:
    tokens, experts = check.draw(4, 3, seed=0).detach(), torch.tensor([1, 0, 1, 0])
    permuted, places = moe_token_permute(tokens, experts)
    assert torch.equal(permuted, tokens[[1, 3, 0, 2]])
    assert torch.equal(moe_token_unpermute(permuted, places), tokens)


def test_padded_experts_name_their_tokens() -> None:
    chosen = torch.tensor([[0, 3], [1, 3], [4, 0]])  # token 2 is in no expert, 0 and 3 in two
    names = chosen.flatten().tolist()
    leaves = [check.draw(5, 4, seed=0)]
    check.assert_equal_to_formula(
        lambda x: moe_token_permute(x, chosen, padded_mode=True)[0],
        lambda x: torch.stack([x[token] for token in names]),
        leaves,
    )

    def formula(rows: Tensor, probs: Tensor) -> Tensor:
        weights = torch.zeros(5, 6, dtype=torch.float64)
        for row, token in enumerate(names):
            weights[token, row] = 1
        return (weights * probs.flatten()) @ rows

    check.assert_equal_to_formula(
        lambda rows, probs: moe_token_unpermute(rows, chosen, probs, True, (5, 4)),
        formula,
        [check.draw(6, 4, seed=1), check.draw(3, 2, seed=2)],
    )
    with pytest.raises(ValueError, match="padded_mode needs restore_shape"):
        moe_token_unpermute(leaves[0], chosen, padded_mode=True)


def test_half_precision_is_summed_in_float32() -> None:
    rows = torch.tensor([[1.0], [2**-9]], dtype=torch.bfloat16)
    weights = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    places = torch.tensor([0, 1], dtype=torch.int32)
    out = moe_token_unpermute(rows, places, weights * 3)
    assert out.dtype is torch.bfloat16
    assert out.item() == torch.tensor(3 + 3 * 2**-9).bfloat16().item()


def test_rows_of_padded_experts_are_weighted_in_float32() -> None:
    """Rounded to bfloat16, the first product would be the other one, and the sum zero."""
    one, near = 1 + 2**-7, 1 + 2**-6
    rows = torch.tensor([[one], [-near]], dtype=torch.bfloat16)
    probs = torch.tensor([[one], [1.0]], dtype=torch.bfloat16)
    out = moe_token_unpermute(rows, torch.zeros(2, 1, dtype=torch.int32), probs, True, (1, 1))
    assert out.dtype is torch.bfloat16
    assert out.item() == one**2 - near == 2**-14
