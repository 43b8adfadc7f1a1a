"""The ring on 1, 2 and 4 ranks against attention on the whole sequence, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ascend_run.plugin_api import HookError
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.testing.pool import GlooPool

from . import formula, jobs
from .formula import Case, FormulaKernel

TOLERANCE = 1e-10
FREE = c.Mask(causal=False)
DOCUMENTS = (5, 6, 13, 27)

CASES = {
    "multi-head": Case(),
    "grouped": Case(groups=2),
    "multi-query": Case(groups=1),
    "odd-batch": Case(batch=3, groups=2),
    "packed": Case(batch=None, groups=2),
    "wider-values": Case(width=3, value_width=6, groups=2),
    "narrower-values": Case(width=6, value_width=3, groups=2),
    "sinks": Case(sinks=True, groups=2),
    "sinks-packed": Case(sinks=True, batch=None),
    "not-causal": Case(mask=FREE, groups=2),
    "other-keys-than-queries": Case(mask=FREE, key_length=48),
    "narrow-window": Case(mask=c.Mask(window=(2, 0))),
    "wide-window": Case(mask=c.Mask(window=(17, 0)), groups=2),
    "window-to-both-sides": Case(mask=c.Mask(causal=False, window=(3, 5))),
    "documents": Case(mask=c.Mask(document_ends=DOCUMENTS), groups=2),
    "documents-and-window": Case(mask=c.Mask(document_ends=DOCUMENTS, window=(4, 0))),
    "documents-not-causal": Case(mask=c.Mask(causal=False, document_ends=DOCUMENTS)),
    "a-document-for-each-rank": Case(mask=c.Mask(document_ends=(4, 8, 16, 24, 28))),
    "queries-that-see-no-key": Case(mask=c.Mask(causal=False, window=(1, 1)), key_length=16),
    "contiguous": Case(cut="contiguous", groups=2),
    "contiguous-not-causal": Case(cut="contiguous", mask=FREE),
    "contiguous-window": Case(cut="contiguous", mask=c.Mask(window=(5, 0))),
    "contiguous-documents": Case(cut="contiguous", mask=c.Mask(document_ends=DOCUMENTS)),
    "keeping-keys": Case(keep="keys", groups=2, width=6, value_width=3),
    "keeping-all": Case(keep="all", groups=2),
    "keeping-all-in-a-window": Case(keep="all", mask=c.Mask(window=(9, 0))),
}
OWN = {
    "inner-reads-no-inputs": Case(reads=frozenset({"out", "lse"}), groups=2),
    "inner-saves-keys-in-a-window": Case(
        reads=frozenset({"q", "out", "lse"}), mask=c.Mask(window=(9, 0)), keep="keys"
    ),
}
PLATFORM = {"softcap": Case(softcap=0.7, groups=2)}


def reference(case: Case) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, log-sum-exp and gradients on the whole sequence."""
    *inputs, dout = case.tensors()
    leaves = [x.requires_grad_() for x in inputs]
    spec = case.spec
    if spec.sinks is not None:
        leaves.append(spec.sinks.requires_grad_())
    allowed = formula.seen(case.mask, range(case.length), range(case.num_keys))
    out, lse = formula.attention(*leaves[:3], spec, allowed)
    return out.detach(), lse.detach(), list(torch.autograd.grad(out, leaves, dout))


def whole(parts: list[Tensor], places: list[list[int]]) -> Tensor:
    """The ranks' rows, each at its position."""
    order = torch.tensor([place for rank in places for place in rank])
    assert sorted(order.tolist()) == list(range(len(order)))
    return torch.cat(parts)[order.argsort()]


def assert_close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    finite = expected.isfinite()
    assert torch.equal(result[~finite], expected[~finite])
    error = (result[finite] - expected[finite]).abs().max() / expected[finite].abs().max()
    assert error <= TOLERANCE


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("case", "platform"),
    [
        *((case, False) for case in (CASES | OWN).values()),
        *((case, True) for case in (CASES | PLATFORM).values()),
    ],
    ids=[*CASES, *OWN, *(f"{name}-on-the-platform" for name in CASES | PLATFORM)],
)
def test_output_log_sum_exp_and_every_gradient_are_those_of_the_whole_sequence(
    gloo_pool: GlooPool, case: Case, platform: bool, world_size: int
) -> None:
    outcomes = gloo_pool.run(jobs.attend, world_size, case, platform)
    rows = [case.rows(rank, world_size) for rank in range(world_size)]
    columns = [case.columns(rank, world_size) for rank in range(world_size)]
    out, lse, (dq, dk, dv, *dsinks) = reference(case)
    assert_close(whole([o.out for o in outcomes], rows), out)
    assert_close(whole([o.lse.movedim(-1, 0) for o in outcomes], rows), lse.movedim(-1, 0))
    for i, (places, expected) in enumerate(((rows, dq), (columns, dk), (columns, dv))):
        assert_close(whole([o.gradients[i] for o in outcomes], places), expected)
    for expected in dsinks:  # each rank holds the share of its queries; training sums over ranks
        assert_close(torch.stack([o.gradients[3] for o in outcomes]).sum(0), expected)


def test_where_the_caller_says_that_its_part_begins_does_not_matter(gloo_pool: GlooPool) -> None:
    """The mask speaks of the whole sequence."""
    cases = [Case(), Case(mask=c.Mask(query_start=8, key_start=8))]
    first, second = (gloo_pool.run(jobs.attend, 2, case) for case in cases)
    assert all(torch.equal(a.out, b.out) for a, b in zip(first, second, strict=True))


def test_every_block_drops_other_places_and_backward_replays_them(gloo_pool: GlooPool) -> None:
    outcomes = gloo_pool.run(jobs.dropped, 4, 5)
    for _, _, forward, backward in outcomes:
        assert sorted(forward) == sorted(backward)
    seeds = [seed for _, _, forward, _ in outcomes for seed in forward]
    assert len({*seeds}) == len(seeds) == 4 * 4
    # What is attended to is linear in v, so a gradient through the same places is exact.
    v, dout = Case().tensors()[2:]
    rows = [Case().rows(rank, 4) for rank in range(4)]
    out, dv = (whole([o[i] for o in outcomes], rows) for i in (0, 1))
    assert (dv * v).sum().item() == pytest.approx((dout * out).sum().item(), rel=TOLERANCE)
    undropped, _, _ = reference(Case())
    assert (out - undropped).abs().max() > 0.1


class Unfit(FormulaKernel):
    features = c.AttentionFeatures()


def test_an_inner_kernel_that_cannot_do_blocks_is_refused_with_the_reasons() -> None:
    from ascend_run.plugins.ring_attention.kernel import RingKernel
    from ascend_run.plugins.ring_attention.partition import ZigZag

    with pytest.raises(HookError, match="Unfit") as refused:
        RingKernel(Unfit(frozenset({"q", "out"})), None, ZigZag())  # type: ignore[arg-type]
    assert len(refused.value.problems) == 2


def test_it_takes_what_the_inner_kernel_takes_sinks_too_and_no_bias() -> None:
    from ascend_run.plugins.ring_attention.kernel import RingKernel
    from ascend_run.plugins.ring_attention.partition import ZigZag

    kernel = RingKernel(jobs.platform_kernel(), None, ZigZag())  # type: ignore[arg-type]
    assert kernel.features.window
    assert kernel.features.documents
    assert not kernel.features.bias
    assert RingKernel(FormulaKernel(), None, ZigZag()).features.sinks  # type: ignore[arg-type]
