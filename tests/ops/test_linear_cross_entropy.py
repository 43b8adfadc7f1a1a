"""Cross-entropy against its formula, token by token: loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.ops import linear_cross_entropy as module
from ascend_run.ops.linear_cross_entropy import linear_cross_entropy, vocab_cross_entropy
from ascend_run.plugin_api.testing.pool import GlooPool

from . import cross_entropy_jobs as jobs


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-300))


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 23),
    vocab=st.integers(2, 40),
    chunk=st.sampled_from([8, 400, 2**20]),
    block=st.sampled_from([8, 700, 2**20]),
    fused=st.booleans(),
)
def test_loss_and_gradients_equal_the_formula_however_they_are_cut(
    tokens: int, vocab: int, chunk: int, block: int, fused: bool
) -> None:
    hidden, weight, labels, mask = jobs.case(tokens, vocab)
    mask[0] = 0.7  # at least one token counts
    got = [x.clone().requires_grad_() for x in (hidden, weight)]
    want = [x.clone().requires_grad_() for x in (hidden, weight)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", chunk)
        patch.setattr(module, "BLOCK_BYTES", block)
        if fused:
            loss = linear_cross_entropy(*got, labels, mask)
        else:
            loss = vocab_cross_entropy(got[0] @ got[1].t(), labels, mask)
        (loss * 2.5).backward()
    expected = jobs.by_formula(*want, labels, mask)
    (expected * 2.5).backward()
    assert relative(loss.detach(), expected.detach()) <= 1e-12
    for ours, reference in zip(got, want, strict=True):
        assert relative(ours.grad, reference.grad) <= 1e-12


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_the_gradients_that_are_wanted_are_taken(wanted: str) -> None:
    hidden, weight, labels, mask = jobs.case(5, 11)
    hidden.requires_grad_(wanted == "hidden")
    weight.requires_grad_(wanted == "weight")
    linear_cross_entropy(hidden, weight, labels, mask).backward()
    assert (hidden.grad is None) == (wanted != "hidden")
    assert (weight.grad is None) == (wanted != "weight")


def test_in_bfloat16_it_is_no_worse_than_the_plain_composition() -> None:
    exact = jobs.case(64, 500)
    reference = [x.clone().requires_grad_() for x in exact[:2]]
    jobs.by_formula(*reference, *exact[2:]).backward()

    def errors(function: object) -> list[float]:
        rounded = [x.bfloat16().requires_grad_() for x in exact[:2]]
        function(*rounded).backward()  # type: ignore[operator]
        return [relative(x.grad.double(), r.grad) for x, r in zip(rounded, reference, strict=True)]

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(
            (hidden @ weight.t()).float(), exact[2], reduction="none"
        )
        return (losses * exact[3].float()).sum()

    ours = errors(lambda h, w: linear_cross_entropy(h, w, exact[2], exact[3]))
    for own, other in zip(ours, errors(plain), strict=True):
        assert own <= 1.05 * other


@pytest.mark.parametrize("from_logits", [False, True], ids=["fused", "logits"])
@pytest.mark.parametrize("bounds", [[0, 6, 12], [0, 7, 9], [0, 8, 8]], ids=str)
def test_with_the_vocabulary_over_two_ranks_the_sum_is_the_whole_one(
    gloo_pool: GlooPool, bounds: list[int], from_logits: bool
) -> None:
    """Equal parts; fewer true rows on the last rank; none at all there."""
    for errors in gloo_pool.run(jobs.vocabulary_parallel, 2, bounds, from_logits):
        assert max(errors) <= 1e-12
