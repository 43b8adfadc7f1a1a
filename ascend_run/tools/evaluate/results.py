"""What was measured of one model, and its JSON. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Perplexity:
    """Of one name of data."""

    name: str
    documents: int
    tokens: int  #: That were predicted.
    loss: float  #: Mean negative log-likelihood of a token. Unit: nats.

    @property
    def perplexity(self) -> float:
        """Infinite where it exceeds the range of a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@attrs.frozen(kw_only=True)
class Results:
    """Of one model."""

    model: str
    perplexities: tuple[Perplexity, ...] = ()

    def summary(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "model": self.model,
            "perplexity": [
                attrs.asdict(one) | {"perplexity": _finite(one.perplexity)}
                for one in self.perplexities
            ],
        }


def _finite(value: float) -> float | None:
    """Return a number that JSON has."""
    return value if math.isfinite(value) else None
