"""What an exchange of heads sends and keeps, in bytes of one rank and one attention. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from .head_shares import HeadShare
from .kv_cache import KvCache

_LSE_BYTES: Final = 4


@attrs.frozen(kw_only=True)
class ExchangeVolume:
    """Of ``head_exchange``, where queries and keys have one length."""

    shares: Sequence[HeadShare]
    rank: int
    """Which of them."""
    held: float
    """Positions of this rank, times the micro-batch."""
    whole: float
    """The same, of the whole sequence."""
    row_bytes: float
    """Of one head at one position: half of a key and a value, and of a query and its output."""
    value_bytes: float
    """Of the value alone."""

    @property
    def share(self) -> HeadShare:
        return self.shares[self.rank]

    @property
    def queries(self) -> float:
        """Put in: of this rank's positions all query heads."""
        return self.held * self.shares[-1].queries[1] * self.row_bytes

    @property
    def keys(self) -> float:
        """Put in: of this rank's positions, for each rank the keys (or values) that it needs."""
        return self.held * self.sent_groups * self.row_bytes

    @property
    def sent_groups(self) -> int:
        """Key-value heads that all ranks need, each as often as a rank needs it."""
        return sum(share.num_groups for share in self.shares)

    @property
    def whole_queries(self) -> float:
        """Put in on the way back: of all positions this rank's query heads."""
        return self.whole * self.share.num_queries * self.row_bytes

    @property
    def whole_keys(self) -> float:
        """The same, of its keys (or values); and what it keeps where it keeps them."""
        return self.whole * self.share.num_groups * self.row_bytes

    @property
    def log_sum_exp(self) -> float:
        return self.whole * self.share.num_queries * _LSE_BYTES

    def forward(self, *, with_keys: bool = True) -> float:
        """All-to-all bytes; without keys and values where these are gathered on the way in."""
        there = self.queries + 2 * self.keys * with_keys
        return there + self.whole_queries + self.log_sum_exp

    def backward(self, kv_cache: KvCache, *, with_keys: bool = True) -> float:
        """The same, with what was not kept of keys and values."""
        again = self.held * self.sent_groups * self.again(kv_cache) * with_keys
        return self.queries + again + self.whole_queries + 2 * self.whole_keys

    def again(self, kv_cache: KvCache) -> float:
        """Bytes of one head at one position that come once more in backward."""
        return {"full": 0.0, "half": self.value_bytes, "none": 2 * self.row_bytes}[kv_cache]
