"""What travels, by formula. No torch."""

from __future__ import annotations

import attrs

from ascend_run.ops.attention.ring_attention.volume import SUM_BYTES, Sends

from .rounds import Rounds


@attrs.frozen(kw_only=True)
class AdaptiveVolume:
    """One pass of one layer forward and back, on one rank.

    Args:
        key_bytes: Of the keys and values of one position, over heads and micro-batch.
        item_bytes: Of one number of them.
    """

    rounds: Rounds
    rank: int
    key_bytes: float
    item_bytes: float

    def sends(self) -> tuple[Sends, ...]:
        """``nbytes`` of a message is what they have on average."""
        sent = [m.num_keys for messages in self.rounds for m in messages if m.source == self.rank]
        taken = [m.num_keys for messages in self.rounds for m in messages if m.target == self.rank]
        sums = max(self.item_bytes, SUM_BYTES) / self.item_bytes
        return tuple(
            Sends(calls=len(keys), nbytes=factor * self.key_bytes * sum(keys) / len(keys), why=why)
            for keys, factor, why in (
                (sent, 1.0, "keys and values, forward"),
                (sent, 1.0, "keys and values, backward"),
                (taken, sums, "gradients of keys and values"),
            )
            if keys
        )

    @property
    def nbytes(self) -> float:
        """Of all messages."""
        return sum(sends.calls * sends.nbytes for sends in self.sends())
