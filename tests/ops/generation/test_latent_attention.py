"""Attention to latents in pages against a softmax over the keys and values of whole sequences."""

import random
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ascend_run.ops.generation.cached_attention import CachedAttention, CachedForward
from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.latent_attention import CachedLatents
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.types.attention import AttentionSpec

from .test_cached_attention import LENGTHS, SPECS, N, softmax_attention

A, R, E, L = 5, 2, 3, 4


@attrs.frozen
class Text:
    """Queries [S, N, A + R], latents [S, L] and rotated keys [S, R] of one sequence."""

    q: Tensor
    latent: Tensor
    rotated: Tensor

    def rows(self, start: int, end: int) -> "Text":
        return Text(self.q[start:end], self.latent[start:end], self.rotated[start:end])

    def expanded(self, up: Tensor, spec: AttentionSpec) -> Tensor:
        """[S, N, E], by the formula."""
        both = torch.einsum("sl,nxl->snx", self.latent, up)
        shared = self.rotated[:, None].expand(-1, N, -1)
        k = torch.cat((both[..., :A], shared), -1)
        return softmax_attention(self.q, k, both[..., A:], spec)


def text(length: int) -> Text:
    return Text(
        *(torch.randn(length, *rest, dtype=torch.float64) for rest in ((N, A + R), (L,), (R,)))
    )


def made(kernel: CachedAttention, up: Tensor, spec: AttentionSpec) -> CachedLatents:
    rows = partial(F.linear, weight=up.flatten(0, 1))
    return CachedLatents(kernel=kernel, up=rows, up_NXL=up, key_width=A, spec=spec)


@pytest.mark.parametrize("kind", SPECS)
def test_chunks_of_three_sequences_attend_as_each_whole(kind: str) -> None:
    """The third begins with the pages of the first, as beams do, so its pages are not adjacent."""
    torch.manual_seed(0)
    draw = random.Random(1)
    options: dict[str, Any] = SPECS[kind]
    spec = AttentionSpec(scale=0.4, **options)
    cache = KeyValueCache(72, 4)
    state = CachedForward(cache)
    up = torch.randn(N, A + E, L, dtype=torch.float64)
    kernel = CachedAttention(FusedCpuAttention(), 0, state)
    latents = made(kernel, up, spec)
    texts = {sequence: text(length) for sequence, length in LENGTHS.items()}
    for sequence, length in LENGTHS.items():
        cache.reserve(sequence, length)
    got: dict[int, list[Tensor]] = {sequence: [] for sequence in texts}
    at = dict.fromkeys(texts, 0)
    planned = iter([{9: 5}, {5: 5, 9: 1}])  # the first tokens of one, and then a later one's
    while any(at[s] < len(texts[s].q) for s in texts):
        drawn = {s: min(draw.choice((0, 1, 5)), len(texts[s].q) - at[s]) for s in texts}
        counts = next(planned, drawn)
        chunks = [
            Chunk(sequence=s, start=at[s], ids=[0] * n, num_logits=0)
            for s, n in counts.items()
            if n
        ]
        if not chunks:
            continue
        new = [texts[one.sequence].rows(one.start, one.start + len(one.ids)) for one in chunks]
        extra = text(2)  # tokens that fill up the row
        q, latent, rotated = (
            torch.cat([getattr(one, name) for one in (*new, extra)])
            for name in ("q", "latent", "rotated")
        )
        step = Step.of(chunks)
        with state.running(step):
            out = latents(q, latent, rotated)
        assert torch.equal(out[-2:], torch.zeros(2, N, E))
        for part in step.parts:
            got[part.sequence].append(out[part.rows])
            at[part.sequence] += part.count
        if 11 not in texts and at[5] > 6:
            cache.fork(5, 11)
            first, rest = texts[5].rows(0, at[5]), text(23 - at[5])
            texts[11] = Text(
                *(
                    torch.cat((getattr(first, name), getattr(rest, name)))
                    for name in ("q", "latent", "rotated")
                )
            )
            got[11], at[11] = [*got[5]], at[5]
    for sequence, one in texts.items():
        want = one.expanded(up, spec)
        torch.testing.assert_close(torch.cat(got[sequence]), want, rtol=0, atol=1e-12)
    pages = cache.num_pages - cache.free_tokens // 4
    assert cache.num_bytes == pages * 4 * (L + R) * 8
    (pool,) = cache._pools.values()
    assert pool.k_GPD.untyped_storage().nbytes() == 72 * (L + R) * 8
    assert pool.v_GPE is pool.k_GPD


def test_a_step_without_tokens_writes_nothing() -> None:
    state = CachedForward(KeyValueCache(16))
    up = torch.randn(N, A + E, L, dtype=torch.float64)
    kernel = CachedAttention(FusedCpuAttention(), 0, state)
    latents = made(kernel, up, AttentionSpec(scale=1.0))
    nothing = torch.zeros(1, dtype=torch.int64)
    one = text(1)
    with state.running(Step(nothing, nothing, (), nothing[:0])):
        out = latents(one.q, one.latent, one.rotated)
    assert torch.equal(out, torch.zeros(1, N, E))
