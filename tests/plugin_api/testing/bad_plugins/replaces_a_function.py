"""Wrong: Megatron's function replaced behind everybody's back."""

from __future__ import annotations

from typing import Any

from ascend_run.plugin_api import hookimpl

from .base import Listens, declared


def replacement(numerator: int, denominator: int) -> int:
    return numerator // denominator


class ReplacesAFunction(Listens):
    manifest = declared("replaces-a-function")

    @hookimpl
    def ascend_configure(self) -> Any:
        import megatron.core.utils

        megatron.core.utils.divide = replacement
        return lambda arguments: arguments
