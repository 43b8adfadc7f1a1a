"""What may become of the parts of a layer. No torch."""

from __future__ import annotations

import itertools
from typing import Final

import attrs

READERS: Final = {"input_layernorm": "self_attention", "pre_mlp_layernorm": "mlp"}
"""Norm, whose output can be discarded -> the module that reads its output."""
PARTS: Final = ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp")
"""Parts of a layer that can be treated beside one another, in the order of the forward."""
WHOLE: Final = ""
"""The layer itself, in place of its parts."""


@attrs.frozen(order=True)
class Treatment:
    """What a layer does not keep; its other parts keep what they save for backward."""

    recomputed: tuple[str, ...] = ()  #: Parts that keep their input only.
    swapped: tuple[str, ...] = ()  #: Parts that keep nothing: what they save is elsewhere.

    @property
    def num_parts(self) -> int:
        """Parts that do not keep what they save."""
        return len(self.recomputed) + len(self.swapped)

    @property
    def words(self) -> str:
        """What is recomputed, and what is swapped."""
        again = " + ".join(part or "layer" for part in self.recomputed)
        away = "swapped " * bool(self.swapped) + " + ".join(self.swapped)
        return ", ".join(filter(None, (again, away))) or "nothing"


NOTHING: Final = Treatment()


def treatments(*, swaps: bool) -> tuple[Treatment, ...]:
    """Return what may become of a layer: of each of its parts, or of the layer itself.

    Args:
        swaps: Whether parts may be swapped.
    """
    fates = ("kept", "recomputed", "swapped") if swaps else ("kept", "recomputed")
    found = []
    for of_parts in itertools.product(fates, repeat=len(PARTS)):
        pairs = [*zip(PARTS, of_parts, strict=True)]
        again = tuple(part for part, fate in pairs if fate == "recomputed")
        found.append(Treatment(again, tuple(part for part, fate in pairs if fate == "swapped")))
    return (*sorted(found, key=lambda one: (one.num_parts, one)), Treatment((WHOLE,)))
