"""How long documents or samples are: key figures, and counts by powers of two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

_WIDTH: Final = 40
"""Characters of the longest bar."""


@attrs.frozen
class LengthBin:
    """Number of documents of ``first`` to ``last`` tokens."""

    first: int
    last: int
    count: int

    @property
    def name(self) -> str:
        """``64 to 127``, or one length."""
        return f"{self.first:,} to {self.last:,}" if self.last > self.first else f"{self.first:,}"


@attrs.frozen(kw_only=True)
class Lengths:
    """Distribution of lengths. Unit: tokens."""

    shortest: int
    median: int
    ninetieth: int
    """Nine in ten are at most this long."""
    longest: int
    bins: tuple[LengthBin, ...]
    """From the shortest to the longest: 0, 1, 2 to 3, 4 to 7, ..."""

    @classmethod
    def of(cls, lengths: NDArray[Any]) -> Lengths:
        """Count the lengths of at least one document.

        Args:
            lengths: [documents] integers.
        """
        ordered = np.sort(lengths)
        # The number of binary digits: 0 for 0, n for 2^(n-1) to 2^n - 1.
        digits = np.frexp(ordered.astype(np.float64))[1]
        counts = np.bincount(digits)
        return cls(
            shortest=int(ordered[0]),
            median=_at(ordered, 0.5),
            ninetieth=_at(ordered, 0.9),
            longest=int(ordered[-1]),
            bins=tuple(
                LengthBin(2**n // 2, max(2**n - 1, 0), int(counts[n]))
                for n in range(int(digits[0]), len(counts))
            ),
        )

    def sentence(self) -> str:
        """Return the key figures."""
        return (
            f"{self.shortest:,} to {self.longest:,} tokens, median {self.median:,}, nine in ten "
            f"at most {self.ninetieth:,}"
        )

    def picture(self) -> Iterator[str]:
        """Yield one line a bin, with a bar."""
        most = max(part.count for part in self.bins)
        names = [part.name for part in self.bins]
        width = max(map(len, names))
        for name, part in zip(names, self.bins, strict=True):
            bar = "#" * -(-part.count * _WIDTH // most)
            yield f"  {name:>{width}}  {bar:<{_WIDTH}}  {part.count:,}".rstrip()


def _at(ordered: NDArray[Any], share: float) -> int:
    """The smallest length that this share of the documents does not exceed."""
    return int(ordered[max(0, int(np.ceil(share * len(ordered))) - 1)])
