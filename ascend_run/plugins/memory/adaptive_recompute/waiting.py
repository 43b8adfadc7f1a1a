"""How long the computation waits for the copies of a layer. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import attrs

from .treatment import PARTS, WHOLE

_GIB: Final = 1 << 30


@attrs.frozen(kw_only=True)
class Channel:
    """The copies to where swapped parts are, and back."""

    to_host: int  #: Unit: nanoseconds of 1 GiB.
    to_device: int
    is_overlapped: bool  #: Whether copies overlap with computation.

    def waited(
        self, nanoseconds: Mapping[str, int], moved: Mapping[str, int], swapped: Collection[str]
    ) -> int:
        """Return for how long a layer waits if some parts are swapped. Unit: nanoseconds.

        Copies of a part start when its forward ends, at the latest, one part after the other; the
        layer after it waits for them. They come back during the backward of the layer after it,
        which takes no less time than the forward of this one.

        Args:
            nanoseconds: Part -> time of its forward.
            moved: Part -> bytes.
        """
        leaving = {part: moved[part] * self.to_host // _GIB for part in PARTS if part in swapped}
        coming = sum(moved[part] for part in swapped) * self.to_device // _GIB
        if not self.is_overlapped:
            return sum(leaving.values()) + coming
        now = arrived = 0
        for part in PARTS:
            now += nanoseconds.get(part, 0)
            if part in leaving:
                arrived = max(arrived, now) + leaving[part]
        layer = max(now, nanoseconds[WHOLE])
        return max(0, arrived - layer) + max(0, coming - layer)
