from __future__ import annotations

import pytest

from ascend_run.plugin_api import Manifest
from ascend_run.types.api_version import in_api_range


@pytest.mark.parametrize(
    ("requires_api", "inside"),
    [
        (">=0,<2", [0, 1]),
        ("==1", [1]),
        (">0, !=2, <=3", [1, 3]),
        (" >= 2 ", [2, 3, 4]),
        (">3,<1", []),
    ],
)
def test_a_range_contains_the_versions_that_meet_all_its_parts(
    requires_api: str, inside: list[int]
) -> None:
    assert [v for v in range(5) if in_api_range(requires_api, v)] == inside


@pytest.mark.parametrize("value", ["", "0", "0,1", ">=0,", "~=1.0", ">=0.1", "==1.*", "> = 1", 0])
def test_what_is_no_range_is_rejected(value: str) -> None:
    with pytest.raises(ValueError, match="is not a range of API versions, such as '>=0,<2'"):
        in_api_range(value)
    with pytest.raises(ValueError, match="is not a range of API versions"):
        Manifest(name="ring", summary="x", requires_api=value)
