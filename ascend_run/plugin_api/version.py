"""The version of the plugin API, and ranges of versions that plugins declare."""

from __future__ import annotations

import re
from typing import Final

from ascend_run.types.condition import COMPARISONS

API_VERSION: Final = 0
"""Provisional: hooks may still change. API 1 follows when every hook has two implementations."""
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
