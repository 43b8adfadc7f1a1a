"""The version of the plugin API, and ranges of versions that plugins declare. No attrs."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

API_VERSION: Final = 0
"""Provisional: hooks may still change. API 1 follows when every hook has two implementations."""
COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_COMPARISON: Final = re.compile(rf"\s*({'|'.join(COMPARISONS)})\s*(\d+)\s*")


def in_api_range(requires_api: str, version: int = API_VERSION) -> bool:
    """Return whether a range of API versions, such as ``>=0,<2``, contains a version.

    Raises:
        ValueError: It is not a range: comparisons with integers, separated by commas.
    """
    found = [_COMPARISON.fullmatch(part) for part in str(requires_api).split(",")]
    if not all(found):
        raise ValueError(
            f"requires_api {requires_api!r} is not a range of API versions, such as '>=0,<2'"
        )
    return all(COMPARISONS[part[1]](version, int(part[2])) for part in found if part)
