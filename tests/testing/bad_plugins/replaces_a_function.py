"""Wrong: functions and a constant of others replaced behind everybody's back."""

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
        import os

        import megatron.core.package_info
        import megatron.core.utils

        import ascend_run.core.train.step

        ascend_run.core.train.step.evaluate = replacement
        megatron.core.package_info.PRE_RELEASE = "mine"
        megatron.core.utils.divide = replacement
        megatron.core.utils._ASYNC_IO_LOOP = replacement  # which was None
        os.getlogin = replacement
        return lambda arguments: arguments
