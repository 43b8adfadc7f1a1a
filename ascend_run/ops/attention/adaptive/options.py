"""Options of plugins whose cut follows from the mask. No torch."""

from __future__ import annotations

import attrs

from ascend_run.ops.attention.ring_attention.cut import Contiguous

from .cut import Remapped


@attrs.frozen(kw_only=True)
class AdaptiveOptions:
    """How a sequence is shared."""

    chunks_per_rank: int = attrs.field(default=4, validator=attrs.validators.ge(2))
    """Into how many chunks the part of a rank is cut, which are then dealt out so that every rank
    has as much to compute: more of them make that more equal where documents are short. Unit:
    chunks."""
    remap: bool = True
    """Deal the chunks out by the mask; without it every rank holds one part, in order, and the mask
    decides only what travels."""

    def sharing(self, window: tuple[int, int] | None) -> Remapped | Contiguous:
        """plugin_api's SequencePartition, for a causal mask with this window."""
        if not self.remap:
            return Contiguous()
        return Remapped(multiple=self.chunks_per_rank, window=window)
