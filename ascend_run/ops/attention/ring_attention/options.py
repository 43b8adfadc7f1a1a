"""Options of plugins that attend to keys and values of other ranks. No torch."""

from __future__ import annotations

from typing import Literal

import attrs

from ascend_run.ops.attention.kv_cache import KvCacheOptions

from .cut import CUTS, Contiguous, ZigZag


@attrs.frozen(kw_only=True)
class SharedSequenceOptions(KvCacheOptions):
    """How a sequence is shared, and what is kept of the others' parts."""

    cut: Literal["zig-zag", "contiguous"] = "zig-zag"
    """How ranks share a sequence: an early and a late part each, of every document where documents
    are known, which gives them equal work under a causal mask; or one part each."""

    @property
    def sharing(self) -> ZigZag | Contiguous:
        """plugin_api's SequencePartition of that cut."""
        return CUTS[self.cut]
