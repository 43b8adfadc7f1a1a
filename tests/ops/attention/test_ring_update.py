"""Two attentions merged by their softmax statistics, against one attention over all keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ascend_run.ops.attention.ring_update import ring_attention_update

S, B, N, D, J = 5, 2, 3, 4, 7


def attention(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return out [S, B, N * D] of scores [B, N, S, J], and the statistics, each repeated eight
    times."""
    largest = scores.amax(-1)
    terms = (scores - largest.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    total = terms.sum(-1)
    out = torch.einsum("bnsj,bnjd->sbnd", terms, values) / total.clamp_min(1e-300).permute(
        2, 0, 1
    ).unsqueeze(-1)
    repeated = (x.unsqueeze(-1).repeat(1, 1, 1, 8) for x in (largest, total))
    return out.flatten(2), *repeated


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = 20 * torch.randn(B, N, S, J, generator=generator, dtype=torch.float64)
    return scores, torch.randn(B, N, J, D, generator=generator, dtype=torch.float64)


def as_tnd(out: Tensor, *statistics: Tensor) -> list[Tensor]:
    """Convert a batch of one to packed tokens."""
    return [out[:, 0].unflatten(-1, (N, D)), *(x[0].transpose(0, 1) for x in statistics)]


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_two_parts_are_the_whole(layout: str) -> None:
    scores, values = drawn()
    cuts = (slice(0, 4), slice(4, J))
    parts = [attention(scores[..., cut], values[:, :, cut]) for cut in cuts]
    whole: list[Tensor] | tuple[Tensor, ...] = attention(scores, values)
    starts = None
    if layout == "TND":
        parts, whole = [as_tnd(*part) for part in parts], as_tnd(*whole)
        starts = torch.tensor([0, 2, S])
    merged = ring_attention_update(*parts[0], *parts[1], layout=layout, starts=starts)
    for ours, formula in zip(merged, whole, strict=True):
        torch.testing.assert_close(ours, formula, rtol=1e-12, atol=1e-12)


def test_a_side_that_saw_no_key_changes_nothing() -> None:
    scores, values = drawn()
    scores[:, :, 1] = -torch.inf
    first, second = scores[..., :4].clone(), scores[..., 4:].clone()
    second[:, :, 3] = -torch.inf
    seen = attention(first, values[:, :, :4])
    merged = ring_attention_update(*seen, *attention(second, values[:, :, 4:]))
    assert torch.equal(merged.out[3], seen[0][3])
    assert torch.equal(merged.softmax_max[:, :, 1], torch.full((B, N, 8), -torch.inf).double())
    assert torch.equal(merged.out[1], torch.zeros(B, N * D).double())
    assert torch.equal(merged.softmax_sum[:, :, 1], torch.zeros(B, N, 8).double())


def test_outputs_keep_their_dtype_beside_float32_statistics() -> None:
    scores, values = (x.float() for x in drawn())
    out, *statistics = attention(scores, values)
    merged = ring_attention_update(out.bfloat16(), *statistics, out.bfloat16(), *statistics)
    assert [x.dtype for x in merged] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(merged.out, out.bfloat16())


def test_a_gradient_is_refused() -> None:
    out, *statistics = attention(*drawn())
    with pytest.raises(RuntimeError, match="ring_attention_update has no backward"):
        ring_attention_update(out.requires_grad_(), *statistics, out, *statistics)
