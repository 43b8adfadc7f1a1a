"""Attention to keys in pages: one call per sequence and run of pages, on views of the pages.

The queries of a key-value group are the rows of one call, so a key is read once for all of them.
Keys before a chunk of a prompt are a full rectangle, the chunk itself is a causal square, and
results over disjoint keys are merged by their log-sum-exps. Keys are never gathered or padded.
"""

# T tokens of a step, C queries of a sequence, N query heads, G key-value heads, R = N/G, P tokens
# of all pages, L tokens of a run, D width of q and k, E width of v

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

import attrs
import torch
from torch import Tensor

from ascend_run.types.attention import AttentionResult, AttentionSpec, CachedKeys

from .blockwise_attention import needs_scores
from .log_sum_exp import as_column, merge_into
from .pieced_attention import one_width
from .visibility import reach

FullKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Unmasked attention: [B, G, C, D], [B, G, L, D], [B, G, L, D] and the scale -> the output
[B, G, C, D] and the log-sum-exp [B, G, C]."""
MaskedKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionSpec], AttentionResult[Any]]
"""``AttentionKernel.forward``, here of packed tensors: [C, N, D] -> [C, N, E]."""
_Piece: TypeAlias = tuple[int, int, int]
"""Position of the first key, and the half-open range of P."""
_WIDE: Final = (torch.float32, torch.float64)


@attrs.frozen
class PagedAttention:
    """``CachedAttentionKernel.forward_cached`` by a device's kernels.

    Numerics: those of its kernels; with several runs, or a chunk that follows cached keys, partial
    results are merged in float32 or wider, up to rounding the same. Half precisions compute a
    chunk with its keys in one call, since partial results would each be rounded.
    """

    full: FullKernel | None  #: None: everything is computed by ``masked``.
    masked: MaskedKernel

    def __call__(self, q_TND: Tensor, keys: CachedKeys, spec: AttentionSpec) -> Tensor:
        is_simple = q_TND.shape[2] == keys.v.shape[2] and not needs_scores(spec)
        in_place = len(keys.runs) == len(q_TND) and all(len(runs) == 1 for runs in keys.runs)
        if self.full is not None and is_simple and in_place:
            out_TNE, lse_NT = self._of_tokens(self.full, q_TND, keys, spec)
        else:
            plain = attrs.evolve(spec, sinks=None)
            found = [
                self._of_sequence(q_TND[first:last], keys, place, plain)
                for place, (first, last) in enumerate(keys.queries)
            ]
            out_TNE, lse_NT = (_joined([part[i] for part in found], dim=i) for i in range(2))
        if spec.sinks is not None:
            with_sink = torch.logaddexp(lse_NT, spec.sinks.to(lse_NT.dtype)[:, None])
            out_TNE = out_TNE * as_column((lse_NT - with_sink).exp())
        return out_TNE.to(q_TND.dtype)

    def _of_tokens(
        self, full: FullKernel, q_TND: Tensor, keys: CachedKeys, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attend with one query per sequence, each of whose keys are one run."""
        left, _ = reach(spec.mask)
        q_TGRD = q_TND.unflatten(1, (keys.k.shape[0], -1))
        k_1GPD, v_1GPE = keys.k.unsqueeze(0), keys.v.unsqueeze(0)
        found = []
        for (first, last), ((low, high),) in zip(keys.queries, keys.runs, strict=True):
            low = low if left < 0 else max(low, high - 1 - left)
            k_1GLD, v_1GLE = (x.narrow(2, low, high - low) for x in (k_1GPD, v_1GPE))
            found.append(full(q_TGRD[first:last], k_1GLD, v_1GLE, spec.scale))
        out_TGRE, lse_TGR = (_joined([part[i] for part in found], dim=0) for i in range(2))
        return out_TGRE.flatten(1, 2), lse_TGR.flatten(1, 2).t()

    def _of_sequence(
        self, q_CND: Tensor, keys: CachedKeys, place: int, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Return out [C, N, E] and the log-sum-exp [N, C], without sinks."""
        start, count = keys.starts[place], q_CND.shape[0]
        left, _ = reach(spec.mask)
        first = 0 if left < 0 else max(0, start - left)  # no query sees a key before it
        sees_all = left < 0 or start + count - 1 - left <= first  # every query sees the first key
        in_full = self.full is not None and sees_all and not needs_scores(spec)
        # Keys that all queries see are cut off, where partial results are precise.
        cut = start if in_full and count > 1 and q_CND.dtype in _WIDE else first
        merged: tuple[Tensor, Tensor] | None = None
        for position, low, high in _pieces(keys.runs[place], first, start + count, cut):
            k_GLD, v_GLE = keys.k[:, low:high], keys.v[:, low:high]
            is_before = position + high - low <= (start if count > 1 else start + 1)
            if in_full and is_before:
                part = self._full(q_CND, k_GLD, v_GLE, spec.scale)
            else:
                part = self._masked(q_CND, k_GLD, v_GLE, spec, start, position)
            if merged is None:
                merged = part
            else:
                wide = torch.promote_types(merged[0].dtype, torch.float32)
                merged = merged[0].to(wide), merged[1]
                merge_into(*merged, *part)
        assert merged is not None, "a sequence without keys"
        return merged

    def _full(
        self, q_CND: Tensor, k_GLD: Tensor, v_GLE: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend to keys that every query sees."""
        assert self.full is not None
        count, heads, _ = q_CND.shape
        groups, out_width = k_GLD.shape[0], v_GLE.shape[2]
        rows = heads // groups
        q_GRD = q_CND.unflatten(1, (groups, rows)).transpose(0, 1).flatten(1, 2)
        q_GRD, k_GLD, v_GLE = one_width(q_GRD, k_GLD, v_GLE)
        out, lse = self.full(q_GRD[None], k_GLD[None], v_GLE[None], scale)
        if out.shape[-1] > out_width:
            out = out[..., :out_width]
        if count == 1:
            return out.reshape(1, heads, out_width), lse.reshape(heads, 1)
        out_CNE = out[0].unflatten(1, (count, rows)).transpose(0, 1).flatten(1, 2)
        lse_NC = lse[0].unflatten(1, (count, rows)).transpose(1, 2).flatten(0, 1)
        return out_CNE, lse_NC

    def _masked(
        self,
        q_CND: Tensor,
        k_GLD: Tensor,
        v_GLE: Tensor,
        spec: AttentionSpec,
        start: int,
        position: int,
    ) -> tuple[Tensor, Tensor]:
        mask = attrs.evolve(spec.mask, query_start=start, key_start=position)
        k_LGD, v_LGE = k_GLD.transpose(0, 1), v_GLE.transpose(0, 1)
        out, lse, _ = self.masked(q_CND, k_LGD, v_LGE, attrs.evolve(spec, mask=mask))
        return out, lse


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join [T, ...] at dim 0, or a log-sum-exp [N, T] at dim 1."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


def _pieces(runs: Sequence[tuple[int, int]], first: int, end: int, cut: int) -> Iterator[_Piece]:
    """Yield the keys at positions from ``first`` to ``end`` in adjacent memory, none of which are
    on both sides of ``cut``."""
    position = 0
    for low, high in runs:
        after = position + high - low
        bounds = [max(position, first), min(after, end)]
        if bounds[0] < cut < bounds[1]:
            bounds.insert(1, cut)
        for begin, stop in pairwise(bounds):
            if begin < stop:
                yield begin, low + begin - position, low + stop - position
        position = after
