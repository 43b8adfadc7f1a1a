"""Wrong once a run is made with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ascend_run.plugin_api import Condition, Numerics, hookimpl

from .base import Listens, declared


class LeavesAVariable(Listens):
    manifest = declared("leaves-a-variable")

    @hookimpl
    def ascend_configure(self) -> Any:
        os.environ["OMP_WAIT_POLICY_OF_A_BAD_PLUGIN"] = "active"
        return lambda arguments: arguments


class WrapsOutput(Listens):
    """Multiplies what each feed-forward answers."""

    def factor(self) -> float:
        raise NotImplementedError

    @hookimpl
    def ascend_mlp(self) -> Any:
        def wrap(module: Any) -> Any:
            module.register_forward_hook(
                lambda module, inputs, out: (out[0] * self.factor(), *out[1:])
            )
            return module

        return wrap


class RoundsOnce(WrapsOutput):
    manifest = declared("rounds-once")

    def factor(self) -> float:
        return 1.0 + 2.0**-20


class ForgetsItsSteps(WrapsOutput):
    manifest = declared("forgets-its-steps", numerics=Numerics.MODEL)

    def __init__(self) -> None:
        self.steps = 0

    @hookimpl
    def ascend_after_step(self) -> None:
        self.steps += 1

    def factor(self) -> float:
        return 1.0 + 0.125 * self.steps


class IdleAndActive(WrapsOutput):
    manifest = declared(
        "idle-and-active",
        numerics=Numerics.MODEL,
        idle=Condition("parallel.tensor_model_parallel_size", "<=", 1, why="nothing is split"),
    )

    def factor(self) -> float:
        return 0.5


MARK = Path(__file__).with_name("ran-before.txt")


class RemembersARun(WrapsOutput):
    """By a file, which a second run finds."""

    manifest = declared("remembers-a-run", numerics=Numerics.MODEL)

    @hookimpl
    def ascend_after_run(self) -> None:
        MARK.touch()

    def factor(self) -> float:
        return 1.125 if MARK.exists() else 1.0
