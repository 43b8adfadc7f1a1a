"""The table of a platform's operators."""

from __future__ import annotations

from typing import Any

from ascend_run.plugin_api import PlatformOps


def twice(x: int) -> int:
    return 2 * x


def table(**fields: Any) -> PlatformOps:
    needed = dict.fromkeys(("rms_norm", "layer_norm", "swiglu", "rotary"), twice)
    return PlatformOps(**needed, **fields)


def test_an_operator_without_a_form_of_the_platform_is_the_torch_form() -> None:
    assert table().form(twice) is twice


def test_the_platforms_form_stands_under_the_torch_forms_name() -> None:
    assert table(fused={"twice": lambda x: x + x + 100}).form(twice)(1) == 102
