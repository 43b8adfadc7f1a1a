"""``verify`` against a second set of seeded bugs, of kinds that the first set does not have.

They are the same on every layout, act only on inputs that a random batch lacks, or show in a
resumed run or in random streams. Half of them are by an author who had not read ``verify``. Each
runs with the options that a user would choose; a bug is found if the verdict names its module too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .campaign import Campaign
from .seeded_bugs.faults import SECOND
from .verify_bugs import BLIND, figures, run

_ASKED: Final = 60
"""Of so many, the number that must be found at the right module."""
_FOUND: Final = 58
_BLIND: Final = 30


def passes(figures: Mapping[str, Any], counts: Mapping[str, int]) -> bool:
    return (
        figures["bugs"] >= _ASKED
        and figures[BLIND]["bugs"] >= _BLIND
        and figures["found at the right place"] >= math.ceil(_FOUND / _ASKED * figures["bugs"])
        and figures["of those, the loss is right"] == figures["said to leave the loss right"]
    )


def cases(seed: int) -> Sequence[str]:
    return tuple(bug.name for module in SECOND for bug in module.BUGS)


CAMPAIGN = Campaign(
    name="verify-bugs-second", seed=0, cases=cases, run=run, figures=figures, passes=passes
)
