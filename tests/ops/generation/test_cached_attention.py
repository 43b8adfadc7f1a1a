"""Attention to pages against a softmax over whole sequences."""

import random
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from ascend_run.ops.attention.block_attention import BlockAttention
from ascend_run.ops.generation.cached_attention import (
    CachedAttention,
    CachedForward,
    selected_rows,
)
from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.types.attention import AttentionFeatures, AttentionSpec, Mask, PositionBias

N, G, D, E, LENGTHS = 4, 2, 6, 3, {5: 23, 9: 14}
SPECS = {
    "causal": {},
    "window": {"mask": Mask(window=(3, 0))},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "softcap": {"softcap": 1.5},
    "alibi": {"position_bias": PositionBias(slopes=torch.tensor([0.5, 0.25, 0.1, 1.0]).double())},
}


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """[S, N, D], [S, G, D], [S, G, E] -> [S, N, E], by the formula."""
    k, v = (x.repeat_interleave(N // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("snd,tnd->nst", q, k) * spec.scale
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.position_bias is not None:
        scores = scores - spec.position_bias.slopes[:, None, None] * distance.abs()
    hidden = distance < 0
    if spec.mask.window is not None:
        hidden = hidden | (distance > spec.mask.window[0])
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("nst,tne->sne", scores.softmax(-1)[..., : len(q)], v)


def tensors(length: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((length, N, D), (length, G, D), (length, G, E))
    q, k, v = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    return q, k, v


class _OfSequences(FusedCpuAttention):
    """A kernel that reads no pages: it is called once per sequence."""

    features = AttentionFeatures.all_but()


@pytest.mark.parametrize("inner", [FusedCpuAttention, _OfSequences, BlockAttention])
@pytest.mark.parametrize("kind", SPECS)
def test_chunks_of_two_sequences_attend_as_each_whole(
    kind: str, inner: type[FusedCpuAttention] | type[BlockAttention]
) -> None:
    torch.manual_seed(0)
    draw = random.Random(1)
    options: dict[str, Any] = SPECS[kind]
    spec = AttentionSpec(scale=0.4, **options)
    cache = KeyValueCache(64, 4)
    state = CachedForward(cache)
    kernel = CachedAttention(inner(), 0, state)
    data = {sequence: tensors(length) for sequence, length in LENGTHS.items()}
    for sequence, length in LENGTHS.items():
        cache.reserve(sequence, length)
    got: dict[int, list[Tensor]] = {sequence: [] for sequence in LENGTHS}
    at = dict.fromkeys(LENGTHS, 0)
    while at != LENGTHS:
        counts = {s: min(draw.choice((0, 1, 5)), LENGTHS[s] - at[s]) for s in LENGTHS}
        chunks = [
            Chunk(sequence=s, start=at[s], ids=[0] * n, num_logits=0)
            for s, n in counts.items()
            if n
        ]
        if not chunks:
            continue
        step = Step.of(chunks)
        rows = [slice(part.start, part.start + part.count) for part in step.parts]
        q, k, v = (
            torch.cat([data[part.sequence][i][r] for part, r in zip(step.parts, rows, strict=True)])
            for i in range(3)
        )
        with state.running(step):
            out = kernel.forward(q[:, None], k[:, None], v[:, None], spec).out[:, 0]
        for part in step.parts:
            got[part.sequence].append(out[part.rows])
            at[part.sequence] += part.count
    for sequence in LENGTHS:
        want = softmax_attention(*data[sequence], spec)
        torch.testing.assert_close(torch.cat(got[sequence]), want, rtol=0, atol=1e-12)


def test_without_a_step_it_is_the_kernel_inside() -> None:
    inner = FusedCpuAttention()
    kernel = CachedAttention(inner, 0, CachedForward())
    q, k, v = (x[:, None] for x in tensors(7))
    spec = AttentionSpec(scale=0.4)
    got, want = kernel.forward(q, k, v, spec), inner.forward(q, k, v, spec)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    gradients = [
        one.backward(torch.ones_like(want.out), q, k, v, *want, spec) for one in (kernel, inner)
    ]
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("kind", SPECS)
def test_a_kernel_of_blocks_has_the_gradients_of_the_platform(kind: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = SPECS[kind]
    spec = AttentionSpec(scale=0.4, **options)
    q, k, v = (x[:, None] for x in tensors(7))
    dout = torch.randn(7, 1, N, E, dtype=torch.float64)
    (got, mine), (want, other) = (
        (result, kernel.backward(dout, q, k, v, *result, spec))
        for kernel in (BlockAttention(), FusedCpuAttention())
        for result in [kernel.forward(q, k, v, spec)]
    )
    torch.testing.assert_close((got.out, got.lse), (want.out, want.lse), rtol=0, atol=1e-12)
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_steps_may_be_of_another_kernel() -> None:
    """One that a rank has for itself, beside one that expects a shard of the sequence."""

    class OfShards(FusedCpuAttention):
        def forward(self, *arguments: Any) -> Any:
            raise AssertionError("it was called in a step")

        forward_cached = forward

    state = CachedForward(KeyValueCache(16))
    assert state.cache is not None
    state.cache.reserve(0, 3)
    kernel = CachedAttention(OfShards(), 0, state, BlockAttention())
    data, spec = tensors(3), AttentionSpec(scale=0.4)
    with state.running(Step.of([Chunk(sequence=0, start=0, ids=[0] * 3, num_logits=0)])):
        out = kernel.forward(*(x[:, None] for x in data), spec).out[:, 0]
    torch.testing.assert_close(out, softmax_attention(*data, spec), rtol=0, atol=1e-12)


@pytest.mark.parametrize("of_batch", ["bias", "documents"])
def test_a_step_takes_nothing_of_a_batch(of_batch: str) -> None:
    spec = AttentionSpec(scale=1.0)
    if of_batch == "bias":
        spec = attrs.evolve(spec, bias=torch.zeros(1))
    else:
        spec = attrs.evolve(spec, mask=Mask(document_ends=(1,)))
    state = CachedForward(KeyValueCache(16))
    step = Step.of([Chunk(sequence=0, start=0, ids=[1], num_logits=1)])
    with state.running(step), pytest.raises(ValueError, match="neither a bias nor documents"):
        CachedAttention(FusedCpuAttention(), 0, state).forward(*map(torch.zeros, [()] * 3), spec)


def test_the_output_layer_sees_the_wanted_rows_alone() -> None:
    state = CachedForward(KeyValueCache(16))
    layer = selected_rows(state)(nn.Identity()).wrap(nn.Identity())
    hidden = torch.arange(5.0)[:, None, None]
    chunks = [
        Chunk(sequence=0, start=4, ids=[1, 1, 1], num_logits=2),
        Chunk(sequence=1, start=0, ids=[1], num_logits=0),
        Chunk(sequence=2, start=9, ids=[1], num_logits=1),
    ]
    with state.running(Step.of(chunks)):
        assert layer(hidden).flatten().tolist() == [1, 2, 4]
    assert torch.equal(layer(hidden), hidden)
