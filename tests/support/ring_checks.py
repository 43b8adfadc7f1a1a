"""Compares attention over a shared sequence with that over the full sequence, case by case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from ascend_run.plugin_api import contracts as c
from ascend_run.testing.pool import GlooPool

from . import ring_formula as formula
from . import ring_jobs as jobs
from .ring_formula import Case

TOLERANCE = 1e-10
FREE = c.Mask(causal=False)
DOCUMENTS = (5, 6, 13, 27)

CASES: Mapping[str, Case] = {
    "multi-head": Case(),
    "grouped": Case(groups=2),
    "multi-query": Case(groups=1),
    "odd-batch": Case(batch=3, groups=2),
    "packed": Case(batch=None, groups=2),
    "wider-values": Case(width=3, value_width=6, groups=2),
    "narrower-values": Case(width=6, value_width=3, groups=2),
    "sinks": Case(sinks=True, groups=2),
    "sinks-packed": Case(sinks=True, batch=None),
    "slopes": Case(slopes=True, groups=2),
    "slopes-and-documents": Case(slopes=True, mask=c.Mask(document_ends=DOCUMENTS)),
    "slopes-not-causal": Case(slopes=True, mask=FREE),
    "not-causal": Case(mask=FREE, groups=2),
    "other-keys-than-queries": Case(mask=FREE, key_length=48),
    "narrow-window": Case(mask=c.Mask(window=(2, 0))),
    "wide-window": Case(mask=c.Mask(window=(17, 0)), groups=2),
    "window-to-both-sides": Case(mask=c.Mask(causal=False, window=(3, 5))),
    "documents": Case(mask=c.Mask(document_ends=DOCUMENTS), groups=2),
    "documents-packed": Case(mask=c.Mask(document_ends=DOCUMENTS), batch=None),
    "documents-and-window": Case(mask=c.Mask(document_ends=DOCUMENTS, window=(4, 0))),
    "documents-not-causal": Case(mask=c.Mask(causal=False, document_ends=DOCUMENTS)),
    "a-document-for-each-rank": Case(mask=c.Mask(document_ends=(4, 8, 16, 24, 28))),
    "documents-of-one-token": Case(mask=c.Mask(document_ends=(*range(1, 32),))),
    "queries-that-see-no-key": Case(mask=c.Mask(causal=False, window=(1, 1)), key_length=16),
}
OWN: Mapping[str, Case] = {
    "inner-reads-no-inputs": Case(reads=frozenset({"out", "lse"}), groups=2),
    "inner-saves-keys-in-a-window": Case(
        reads=frozenset({"q", "out", "lse"}), mask=c.Mask(window=(9, 0))
    ),
}
"""Cases for an inner kernel with given ``reads``."""
PLATFORM: Mapping[str, Case] = {"softcap": Case(softcap=0.7, groups=2)}
BIASED: Mapping[str, Case] = {
    "bias": Case(bias=(2, 4, 32, 32), groups=2),
    "bias-of-heads-and-keys": Case(bias=(4, 1, 32), mask=FREE),
    "bias-of-queries": Case(bias=(32, 1), sinks=True),
    "bias-of-keys": Case(bias=(32,)),
    "bias-of-heads": Case(bias=(4, 1, 1), mask=c.Mask(document_ends=DOCUMENTS)),
    "bias-and-documents": Case(bias=(32, 32), mask=c.Mask(document_ends=DOCUMENTS)),
    "bias-and-a-window": Case(bias=(4, 32, 32), mask=c.Mask(window=(5, 0)), softcap=0.9),
    "general-mask": Case(bias=(32, 32), general_mask=True, mask=FREE, groups=2),
    "general-mask-of-rows": Case(
        bias=(2, 1, 32, 32), general_mask=True, bias_requires_grad=False, mask=FREE, sinks=True
    ),
    "general-mask-of-heads": Case(bias=(2, 4, 32, 32), general_mask=True, sinks=True),
}
"""Cases for the platform's kernel, if the plugin supports a bias."""

BFLOAT16_MASKS: Mapping[str, c.Mask] = {
    "causal": c.Mask(),
    "window": c.Mask(window=(20, 0)),
    "documents": c.Mask(document_ends=(17, 64, 101)),
}


@st.composite
def cases(draw: st.DrawFn, multiple: int = 8) -> Case:
    """Draw any problem whose length ``multiple`` divides and whose heads two ranks can share."""
    heads_per_group = draw(st.sampled_from([1, 2, 3]))
    groups = draw(st.sampled_from([2, 4]))
    length = multiple * draw(st.integers(1, 5))
    ends = draw(st.none() | st.sets(st.integers(1, length - 1), max_size=6).map(sorted))
    return Case(
        heads=groups * heads_per_group,
        groups=groups,
        batch=draw(st.sampled_from([None, 1, 2])),
        length=length,
        width=draw(st.integers(1, 5)),
        value_width=draw(st.integers(1, 5)),
        sinks=draw(st.booleans()),
        slopes=draw(st.booleans()),
        mask=c.Mask(
            causal=draw(st.booleans()),
            window=draw(st.none() | st.tuples(st.integers(-1, 20), st.integers(-1, 20))),
            document_ends=tuple(ends) if ends else None,
        ),
    )


def reference(case: Case) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return output, log-sum-exp and gradients on the full sequence, in float64."""
    *inputs, dout = case.tensors()
    leaves = [x.requires_grad_() for x in inputs]
    spec = case.spec
    bias = spec.bias if case.bias_requires_grad else None
    leaves += [x.requires_grad_() for x in (bias, spec.sinks) if x is not None]
    allowed = formula.seen(case.mask, range(case.length), range(case.num_keys))
    out, lse = formula.attention(*leaves[:3], spec, allowed)
    return out.detach(), lse.detach(), list(torch.autograd.grad(out, leaves, dout))


def whole(parts: Sequence[Tensor], places: Sequence[Sequence[int]]) -> Tensor:
    """Concatenate the ranks' rows in position order."""
    order = torch.tensor([place for rank in places for place in rank])
    assert sorted(order.tolist()) == list(range(len(order)))
    return torch.cat([*parts])[order.argsort()]


def assert_at_parity(
    gloo_pool: GlooPool,
    plugin: Any,
    named: Mapping[str, Case],
    world_size: int,
    platform: bool = False,
) -> list[list[jobs.Outcome]]:
    """Compare output, log-sum-exp and every gradient of each case; returns the results by rank."""
    outcomes = gloo_pool.run(jobs.attend, world_size, plugin, [*named.values()], platform)
    for index, (name, case) in enumerate(named.items()):
        _assert_same(name, plugin, case, [of_rank[index] for of_rank in outcomes])
    return outcomes


def _assert_same(name: str, plugin: Any, case: Case, outcomes: Sequence[jobs.Outcome]) -> None:
    size = len(outcomes)
    rows = [jobs.held(plugin, case, case.length, rank, size) for rank in range(size)]
    columns = [jobs.held(plugin, case, case.num_keys, rank, size) for rank in range(size)]
    out, lse, (dq, dk, dv, *extras) = reference(case)
    assert_close(f"{name}: out", whole([o.out for o in outcomes], rows), out)
    found = whole([o.lse.movedim(-1, 0) for o in outcomes], rows)
    assert_close(f"{name}: lse", found, lse.movedim(-1, 0))
    expected = (("dq", rows, dq), ("dk", columns, dk), ("dv", columns, dv))
    for i, (what, places, gradient) in enumerate(expected):
        assert_close(f"{name}: {what}", whole([o.gradients[i] for o in outcomes], places), gradient)
    assert {len(o.gradients) for o in outcomes} == {3 + len(extras)}, name
    # Each rank holds its queries' contribution; training sums over ranks.
    for i, gradient in enumerate(extras, start=3):
        summed = torch.stack([o.gradients[i] for o in outcomes]).sum(0)
        assert_close(f"{name}: gradient {i}", summed, gradient)


def assert_close(name: str, result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape, name
    finite = expected.isfinite()
    assert torch.equal(result[~finite], expected[~finite]), name
    error = distance(result[finite], expected[finite])
    assert error <= TOLERANCE, f"{name}: {error:.1e}"


def distance(result: Tensor, expected: Tensor) -> float:
    """Return max|a - b| / max|b|; the absolute error if b is only noise."""
    if not expected.numel():
        return 0.0
    scale = max(expected.abs().max().item(), 1e-3)
    return (result.double() - expected).abs().max().item() / scale


def assert_bfloat16_loses_no_more_than_twice_what_the_kernel_loses_alone(
    gloo_pool: GlooPool, plugin: Any, world_size: int, **shape: int
) -> None:
    """Compare the errors, against float64, of the platform's kernel and of the plugin around it."""
    plain = Case(length=128, heads=4, groups=2, width=16, value_width=16)
    cases = [attrs.evolve(plain, mask=mask, **shape) for mask in BFLOAT16_MASKS.values()]
    halved = [attrs.evolve(case, dtype=torch.bfloat16) for case in cases]
    shared = gloo_pool.run(jobs.attend, world_size, plugin, halved, True)
    for index, (name, case) in enumerate(zip(BFLOAT16_MASKS, cases, strict=True)):
        alone = jobs.attend_whole(case)
        ranks = range(world_size)
        rows = [jobs.held(plugin, case, case.length, rank, world_size) for rank in ranks]
        out, _, gradients = reference(_rounded(case))
        for place, expected in enumerate((out, *gradients)):
            parts = [(of[index].out, *of[index].gradients)[place] for of in shared]
            allowed = 2 * distance((alone.out, *alone.gradients)[place], expected)
            assert distance(whole(parts, rows), expected) <= allowed, (name, place)


class _Rounded(Case):
    """The same problem, rounded to bfloat16."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, dout = super().tensors()
        return tuple(x.bfloat16().double() for x in (q, k, v, dout))  # type: ignore[return-value]


def _rounded(case: Case) -> Case:
    return _Rounded(**attrs.asdict(case, recurse=False))


@attrs.frozen(kw_only=True)
class _Shown(Case):
    """A problem whose values are unit vectors: the output is the probabilities."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, dout = super().tensors()
        unit = torch.eye(self.num_keys, dtype=torch.float64)
        unit = unit.view(self.num_keys, *[1] * (v.dim() - 2), self.num_keys)
        return q, k, unit.expand_as(v), dout


def assert_dropout_is_that_of_the_formula(
    gloo_pool: GlooPool, plugin: Any, case: Case, world_size: int
) -> list[tuple[jobs.Outcome, list[int], list[int]]]:
    """Check that output and gradients are those of the dropped-out probabilities, scaled by 1 /
    keep probability; returns the results by rank."""
    case = _Shown(**attrs.asdict(attrs.evolve(case, value_width=case.num_keys), recurse=False))
    outcomes = gloo_pool.run(jobs.dropped, world_size, plugin, case)
    rows, columns = (
        [jobs.held(plugin, case, length, rank, world_size) for rank in range(world_size)]
        for length in (case.length, case.num_keys)
    )
    *inputs, dout = case.tensors()
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    spec = attrs.evolve(case.spec, dropout=None)
    leaves = [q, k, v, *([] if spec.sinks is None else [spec.sinks.requires_grad_()])]
    allowed = formula.seen(case.mask, range(case.length), range(case.num_keys))
    probabilities, _ = formula.attention(q, k, inputs[2], spec, allowed)
    out = whole([o.out for o, _, _ in outcomes], rows)
    keep = 1 - case.dropout
    kept = (out > probabilities / (2 * keep)).double() / keep
    assert_close(f"{case}: out", out, probabilities.detach() * kept)
    plain = probabilities > 1e-9  # smaller ones do not matter
    seen, num_kept = int(plain.sum()), int((plain & (kept > 0)).sum())
    spread = (seen * case.dropout * keep) ** 0.5
    assert abs(num_kept - seen * keep) <= 5 * spread, f"{num_kept} of {seen} are kept"
    wide = v.repeat_interleave(case.heads // case.groups, dim=-2)
    again = torch.einsum("s...nt,t...ne->s...ne", probabilities * kept, wide)
    gradients = torch.autograd.grad(again, leaves, dout)
    for i, (name, places) in enumerate((("dq", rows), ("dk", columns), ("dv", columns))):
        found = whole([o.gradients[i] for o, _, _ in outcomes], places)
        assert_close(f"{case}: {name}", found, gradients[i])
    for i in range(3, len(leaves)):
        summed = torch.stack([o.gradients[i] for o, _, _ in outcomes]).sum(0)
        assert_close(f"{case}: gradient {i}", summed, gradients[i])
    return outcomes


def assert_every_block_drops_other_places_and_backward_replays_them(
    gloo_pool: GlooPool, plugin: Any, num_blocks: int, case: Case | None = None
) -> None:
    """Check on 4 ranks, each with this many blocks."""
    case = attrs.evolve(case or Case(), dropout=0.5)
    outcomes = assert_dropout_is_that_of_the_formula(gloo_pool, plugin, case, 4)
    for _, forward, backward in outcomes:
        assert sorted(forward) == sorted(backward)
    seeds = [seed for _, forward, _ in outcomes for seed in forward]
    assert len({*seeds}) == len(seeds) == 4 * num_blocks
