"""Multi-latent attention of a step, whose cache has the latents and no keys and values.

Keys and values of all heads are linear in one latent per token, but for a rotated part of the key
that the heads share. So the half of that projection which makes keys can be applied to the queries,
and the half which makes values to the output: queries then attend to the latents themselves, which
are the keys and the values of one group.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
"""

# T tokens of a step, C tokens of one sequence, N query heads on this rank, A width of a query or
# key without RoPE, R width with RoPE, E width of a value, L latent size, M = L + R

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import attrs
import torch
from torch import Tensor

from ascend_run.types.attention import AttentionSpec, CachedAttentionKernel, CachedKeys

from .cached_attention import CachedAttention
from .lean_layer import OfRows
from .step import StepPart


@attrs.frozen(kw_only=True, eq=False)
class CachedLatents:
    """The attention of one layer to latents in pages.

    A chunk that begins a sequence attends to its own tokens alone, so its keys and values are
    computed from the latents, which takes fewer operations; they are dropped afterwards.

    Numerics: in float64 that of keys and values within 1e-10; half precisions round the queries
    after the projection.
    """

    kernel: CachedAttention  #: Around a kernel that reads pages.
    up: OfRows  #: The projection, [C, L] -> [C, N * X]; X = A + E.
    up_NXL: Tensor  #: Its weight.
    key_width: int  #: A.
    spec: AttentionSpec

    def __call__(self, q_TND: Tensor, latent_TL: Tensor, rotated_TR: Tensor) -> Tensor:
        """Compute the step that runs: queries [T, N, A + R], normalized latents and the rotated
        shared keys -> [T, N, E]; 0 of tokens after those of its sequences."""
        state = self.kernel.state
        assert state.step is not None, "no step runs"
        parts = state.step.parts
        value_width = self.up_NXL.shape[1] - self.key_width
        out_TNE = q_TND.new_zeros(*q_TND.shape[:2], value_width)
        if not (count := sum(part.count for part in parts)):
            return out_TNE
        entry_T1M = torch.cat((latent_TL, rotated_TR), -1)[:count].unsqueeze(1)
        keys = state.write(self.kernel.layer_index, entry_T1M, entry_T1M)
        first = [part for part in parts if part.start == 0 and part.count > 1]
        for rows in (part.rows for part in first):
            out_TNE[rows] = self._expanded(q_TND[rows], latent_TL[rows], rotated_TR[rows])
        if not first:
            out_TNE[:count] = self._absorbed(q_TND[:count], keys)
        elif len(first) < len(parts):
            rows_T, rest = _without(first, parts, keys)
            out_TNE[rows_T] = self._absorbed(q_TND[rows_T], rest)
        return out_TNE

    def _expanded(self, q_CND: Tensor, latent_CL: Tensor, rotated_CR: Tensor) -> Tensor:
        heads, width = self.up_NXL.shape[0], self.key_width
        up_CNX = self.up(latent_CL).unflatten(-1, (heads, -1))
        shared_CNR = rotated_CR.unsqueeze(1).expand(-1, heads, -1)
        k_CND = torch.cat((up_CNX[..., :width], shared_CNR), -1)
        q, k, v = (x.unsqueeze(1) for x in (q_CND, k_CND, up_CNX[..., width:]))
        return self.kernel.inner.forward(q, k, v, self.spec).out.squeeze(1)

    def _absorbed(self, q_TND: Tensor, keys: CachedKeys) -> Tensor:
        width, kernel = self.key_width, cast("CachedAttentionKernel", self.kernel.inner)
        plain_NTA = q_TND[..., :width].transpose(0, 1)
        latent_NTL = torch.bmm(plain_NTA, self.up_NXL[:, :width])
        q_TNM = torch.cat((latent_NTL.transpose(0, 1), q_TND[..., width:]), -1)
        # Values are whole entries: with keys and values of one width nothing is padded.
        out_TNM = kernel.forward_cached(q_TNM, keys, self.spec)
        out_NTL = out_TNM[..., : latent_NTL.shape[-1]].transpose(0, 1)
        return torch.bmm(out_NTL, self.up_NXL[:, width:].transpose(1, 2)).transpose(0, 1)


def _without(
    left_out: Sequence[StepPart], parts: Sequence[StepPart], keys: CachedKeys
) -> tuple[Tensor, CachedKeys]:
    """Return the rows of the other sequences, and their keys for queries of those rows alone."""
    kept = [place for place, part in enumerate(parts) if part not in left_out]
    rows: list[int] = []
    queries = []
    for part in (parts[place] for place in kept):
        queries.append((len(rows), len(rows) + part.count))
        rows += range(part.first, part.first + part.count)
    rest = CachedKeys(
        k=keys.k,
        v=keys.v,
        runs=[keys.runs[place] for place in kept],
        queries=queries,
        starts=[keys.starts[place] for place in kept],
    )
    return torch.tensor(rows, dtype=torch.int64, device=keys.k.device), rest
