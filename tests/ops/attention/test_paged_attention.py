"""Attention to pages against a softmax over each sequence's keys."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.testing.effects import count_operations
from ascend_run.types.attention import AttentionSpec, CachedKeys, Mask, PositionBias
from tests.ops.generation.test_cached_attention import softmax_attention

N, G, D, PAGE = 4, 2, 6, 4
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 1.0]).double()


@attrs.frozen
class Case:
    """Sequences of a step: of each, its tokens before, those of the step, and its pages."""

    sequences: tuple[tuple[int, int, tuple[int, ...]], ...]
    spec: AttentionSpec
    width: int = D  #: Of v.
    dtype: torch.dtype = torch.float64


def runs_of(pages: tuple[int, ...], length: int) -> list[tuple[int, int]]:
    """Ranges of tokens; adjacent pages are one."""
    runs: list[tuple[int, int]] = []
    for place, page in enumerate(pages):
        low, high = page * PAGE, page * PAGE + min(PAGE, length - place * PAGE)
        if low >= high:
            break
        if runs and runs[-1][1] == low:
            low = runs.pop()[0]
        runs.append((low, high))
    return runs


def check(case: Case, kernel: FusedCpuAttention, tolerance: float) -> None:
    """Compare a step with a softmax over each whole sequence. Free pages are NaN."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = PAGE * (1 + max(page for *_, pages in case.sequences for page in pages))
    k = torch.full((G, num_tokens, D), torch.nan, dtype=case.dtype)
    v = torch.full((G, num_tokens, case.width), torch.nan, dtype=case.dtype)
    rows: list[Tensor] = []
    wanted, runs, queries = [], [], []
    for before, count, pages in case.sequences:
        length = before + count
        q_SND, k_SGD, v_SGE = (
            torch.randn(length, heads, width, generator=generator, dtype=torch.float64)
            for heads, width in ((N, D), (G, D), (G, case.width))
        )
        q_SND, k_SGD, v_SGE = (x.to(case.dtype) for x in (q_SND, k_SGD, v_SGE))
        found = runs_of(pages, length)
        at = 0
        for low, high in found:
            k[:, low:high] = k_SGD[at : at + high - low].transpose(0, 1)
            v[:, low:high] = v_SGE[at : at + high - low].transpose(0, 1)
            at += high - low
        assert at == length
        queries.append((len(rows), len(rows) + count))
        rows += q_SND[before:].unbind(0)
        runs.append(found)
        double = (x.double() for x in (q_SND, k_SGD, v_SGE))
        wanted.append(softmax_attention(*double, case.spec)[before:])
    starts = [before for before, *_ in case.sequences]
    keys = CachedKeys(k=k, v=v, runs=runs, queries=queries, starts=starts)
    got = kernel.forward_cached(torch.stack(rows), keys, case.spec)
    assert got.dtype is case.dtype
    torch.testing.assert_close(got.double(), torch.cat(wanted), rtol=0, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Pages in any order, so in one run or several."""
    counts = draw(st.lists(st.sampled_from((1, 1, 2, 5)), min_size=1, max_size=3))
    befores = [draw(st.integers(0, 11)) for _ in counts]
    needed = [-(-(a + b) // PAGE) for a, b in zip(befores, counts, strict=True)]
    pages = list(range(sum(needed) + 1))
    if draw(st.booleans()):
        pages = draw(st.permutations(pages))
    sequences = []
    for before, count, number in zip(befores, counts, needed, strict=True):
        sequences.append((before, count, tuple(pages[:number])))
        pages = pages[number:]
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["mask"] = Mask(window=(draw(st.integers(0, 6)), 0))
    if draw(st.booleans()):
        options["sinks"] = SINKS
    match draw(st.sampled_from(("plain", "plain", "softcap", "slopes"))):
        case "softcap":
            options["softcap"] = 1.5
        case "slopes":
            options["position_bias"] = PositionBias(slopes=SLOPES)
    width = draw(st.sampled_from((D, 3, 8)))
    return Case(tuple(sequences), AttentionSpec(scale=0.4, **options), width)


@settings(max_examples=60, deadline=None)
@given(case=cases(), in_blocks=st.booleans())
def test_any_step_attends_as_each_whole_sequence(case: Case, in_blocks: bool) -> None:
    check(case, FusedCpuAttention(in_blocks=in_blocks), 1e-12)


ONE_RUN = ((9, 1, (1, 2, 3)), (6, 5, (5, 6, 7)))
RUNS = ((9, 1, (4, 1, 0)), (6, 5, (7, 2, 6)))


@pytest.mark.parametrize("sequences", [ONE_RUN, RUNS], ids=["one-run", "runs"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.03)], ids=str
)
def test_narrow_dtypes_are_close(
    sequences: tuple[tuple[int, int, tuple[int, ...]], ...], dtype: torch.dtype, tolerance: float
) -> None:
    check(Case(sequences, AttentionSpec(scale=0.4), dtype=dtype), FusedCpuAttention(), tolerance)


def num_calls(sequences: tuple[tuple[int, int, tuple[int, ...]], ...], **options: Any) -> int:
    """Calls of the fused kernel."""
    spec = AttentionSpec(scale=0.4, **options)
    case = Case(sequences, spec)
    with count_operations() as counts:
        check(case, FusedCpuAttention(), 1e-12)
    return sum(n for name, n in counts.items() if "flash_attention" in name)


def test_a_run_is_one_call_and_a_chunk_after_keys_is_two() -> None:
    new, chunk = (9, 1, (1, 2, 3)), (6, 5, (5, 6, 7))
    assert num_calls((new,)) == 1
    assert num_calls((chunk,)) == 2
    assert num_calls((new, chunk)) == 3
    assert num_calls(((9, 1, (4, 1, 0)),)) == 3
    assert num_calls((new,), mask=Mask(window=(3, 0))) == 1


def test_pages_before_a_window_are_not_read() -> None:
    assert num_calls(((9, 1, (4, 1, 6)),), mask=Mask(window=(2, 0))) == 2
