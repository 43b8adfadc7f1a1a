"""Wrong once a run is made with them."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
from datetime import timedelta
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


KEPT: list[Any] = []


class LeavesMuch(Listens):
    """What a process has one of, or keeps until it ends."""

    manifest = declared("leaves-much")

    @hookimpl
    def ascend_after_run(self, context: Any) -> None:
        import numpy as np
        import torch
        from torch.nn.modules.module import register_module_forward_hook

        KEPT.append(context.models)
        atexit.register(str)
        os.open(__file__, os.O_RDONLY)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 1e6)
        socket.setdefaulttimeout(1e6)
        threading.Thread(target=time.sleep, args=(1e6,), name="left", daemon=True).start()
        np.seterr(under="print")
        register_module_forward_hook(lambda *_: None)
        torch.distributed.new_group([0], timeout=timedelta(seconds=77))
        torch.set_num_threads(3)


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


class BreaksExperts(RoundsOnce):
    """And leaves a dense model alone."""

    manifest = declared("breaks-experts")
    ascend_moe_layer = RoundsOnce.ascend_mlp

    @hookimpl
    def ascend_mlp(self) -> Any:
        return None


class FlipsABit(Listens):
    """Of one weight, after the third step."""

    manifest = declared("flips-a-bit")

    @hookimpl
    def ascend_after_step(self, context: Any) -> None:
        import torch

        if context.step == 3:
            weight = next(context.models["policy"].chunks[0].parameters()).detach()
            weight.view(torch.int32).view(-1)[0] ^= 1


class DrawsANumber(Listens):
    """Of those that dropout draws from."""

    manifest = declared("draws-a-number")

    @hookimpl
    def ascend_before_step(self) -> None:
        import torch

        torch.rand(1)


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
