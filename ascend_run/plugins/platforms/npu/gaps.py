"""Operators that some releases of torch_npu lack, reported before a run calls them.

A patch release may be younger than a release of a higher number, so an operator is missing in a
list of ranges, and not in everything below a version. No torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

RECORD: Final = Path(__file__).parent / "proof/releases.json"

KNOWN_GAPS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("npu_fusion_attention_grad_v2", "has no argument 'softmax_layout'"): ("2.7.1", "2.8.0"),
    ("npu_fusion_attention_v2", "has no argument 'softmax_layout'"): ("2.7.1", "2.8.0"),
    ("npu_ring_attention_update", "is not there"): (
        "2.7.1 - 2.7.1.post6",
        "2.8.0 - 2.9.0.post4",
        "2.9.1 - 2.10.0.post2",
    ),
}
"""(operator, problem) -> ranges of neighbouring releases that do not take one of our calls. A test
checks that the table is complete. Code that uses an operator checks ``lacking`` for it."""


def installed_release() -> str:
    """Return the version of the torch_npu that this process has imported; empty if there is none.

    Without torch_npu the operators are registered by other code, as in tests.
    """
    return str(getattr(sys.modules.get("torch_npu"), "__version__", ""))


def lacking(release: str) -> dict[str, str]:
    """Return operator -> problem for a release; empty for a version that cannot be parsed."""
    try:
        version = Version(release.partition("+")[0])
    except InvalidVersion:
        return {}
    return {
        operator: problem
        for (operator, problem), spans in KNOWN_GAPS.items()
        if any(_within(version, span) for span in spans)
    }


def taking(operator: str) -> str:
    """Return the releases that take an operator, for a message: ``2.8.0.post2 or later``."""
    names: list[str] = json.loads(RECORD.read_text(encoding="utf-8"))["releases"]
    ranges = as_ranges(names, {name for name in names if operator not in lacking(name)})
    *before, last = ranges
    if last.endswith(names[-1]):
        last = f"{last.partition(' - ')[0]} or later"
    return ", ".join([*before, last])


def as_ranges(names: Sequence[str], chosen_names: set[str]) -> tuple[str, ...]:
    """Return ranges of neighbours in an ordered list: ``2.7.1 - 2.8.0``, or a single name."""
    spans: list[list[str]] = []
    open_span = False
    for name in names:
        if name in chosen_names and open_span:
            spans[-1].append(name)
        elif name in chosen_names:
            spans.append([name])
        open_span = name in chosen_names
    return tuple(s[0] if len(s) == 1 else f"{s[0]} - {s[-1]}" for s in spans)


def _within(version: Version, span: str) -> bool:
    first, _, last = span.partition(" - ")
    return Version(first) <= version <= Version(last or first)
