"""Selects the kernel of an operator. Imports torch only to build one.

An operator has up to three implementations besides the platform's own: plain torch operations, the
same compiled into one kernel, and Liger's.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from ascend_run.types.model import PlatformOps

from .compilers import missing_compiler

KERNELS: Final = ("auto", "torch", "compile", "liger")
PLATFORMS_OWN: Final = "platform"
LIGER: Final = "liger_kernel"

PLAIN: Final[Mapping[str, str]] = {
    "rms_norm": "ascend_run.ops.elementwise.rms_norm:plain_rms_norm",
    "swiglu": "ascend_run.ops.elementwise.swiglu:plain_swiglu",
    "rotary": "ascend_run.ops.elementwise.rotary:plain_rotary",
    "split_qkv_rotary": "ascend_run.ops.elementwise.rotary:plain_split_qkv_rotary",
}
"""Operator -> its plain torch operations. Whole names, so that the text shows what it imports."""

BEST_ON_GPU: Final[Mapping[str, tuple[str, ...]]] = {
    "rms_norm": ("liger", "compile"),
    "swiglu": ("compile",),
    "rotary": ("compile",),
    "split_qkv_rotary": ("compile",),
}
"""Preference of ``auto`` on CUDA; the first available one. Liger's SwiGLU and rotary take separate
tensors and so need a copy of what Megatron's layers pack into one: a compiled graph reads it in
place and moves three and two numbers, where copy and kernel move seven and four."""


@attrs.frozen(kw_only=True)
class KernelOptions:
    """Options, set by ``plugins.<name>.<field>=<value>``."""

    kernel: str = attrs.field(default="auto", validator=attrs.validators.in_(KERNELS))
    """Which kernel: ``auto`` (the platform's best), ``torch`` (plain operations, to find out
    whether a kernel is at fault), ``compile`` (the same by torch.compile), ``liger`` (CUDA)."""


def problems(plugin: str, kernel: str, platform: str) -> list[str]:
    """Return one message for each reason why a kernel is unavailable."""
    option = f"{plugin}: plugins.{plugin}.kernel={kernel}"
    if kernel == "liger" and platform != "cuda":
        return [f"{option} is for platform cuda, not {platform}; use auto, compile or torch"]
    if kernel == "liger" and not has_liger():
        return [f"{option} needs the package liger-kernel; pip install liger-kernel, or use auto"]
    if kernel == "compile" and platform == "npu":
        return [f"{option} is not supported on platform npu; use auto or torch"]
    if kernel == "compile" and platform == "cpu" and (missing := missing_compiler()):
        problem = f"{option} needs a C++ compiler ({missing}) on the PATH"
        return [f"{problem}; install one, set CXX to it, or use auto"]
    return []


def has_liger() -> bool:
    return importlib.util.find_spec(LIGER) is not None


def choose(operator: str, kernel: str, device_type: str) -> str:
    """Return the implementation of one operator: one of ``KERNELS`` without ``auto``, or the
    platform's.

    Args:
        operator: An entry of the table, by name.
        device_type: Of torch's device.
    """
    if kernel != "auto":
        return kernel
    if device_type != "cuda":
        return PLATFORMS_OWN
    forms = BEST_ON_GPU[operator]
    return next(form for form in forms if form != "liger" or has_liger())


def in_form(operator: str, form: str) -> Callable[..., Any]:
    """Return the operator as implemented by ``torch``, ``compile`` or ``liger``.

    Within a torch.compile graph all of them run the plain operations, which the compiler fuses.
    """
    import torch

    module, _, name = PLAIN[operator].partition(":")
    plain = getattr(importlib.import_module(module), name)
    if form == "torch":
        implementation: Callable[..., Any] = plain
        return implementation
    if form == "liger":
        kernel = getattr(importlib.import_module("ascend_run.ops.kernels.liger"), operator)
    else:
        from .own_graphs import with_own_graphs

        kernel = with_own_graphs(plain, limit=16)

    @functools.wraps(plain)
    def run(*args: Any) -> Any:
        return plain(*args) if torch.compiler.is_compiling() else kernel(*args)

    return run


def replaced(ops: PlatformOps, kernel: str, device_type: str, *operators: str) -> PlatformOps:
    """Replace some operators of the table; return the same table if all are the platform's.

    Args:
        kernel: One of ``KERNELS``.
    """
    forms = {name: choose(name, kernel, device_type) for name in operators}
    made: dict[str, Any] = {
        name: in_form(name, form) for name, form in forms.items() if form != PLATFORMS_OWN
    }
    return attrs.evolve(ops, **made) if made else ops
