"""Which kernel computes an entry of the table of operators. No torch until one is made.

An operator has up to three forms beside the platform's own: the plain formula in torch's
operations, the same compiled into one kernel, and Liger's.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from .compilers import missing_compiler

KERNELS: Final = ("auto", "torch", "compile", "liger")
PLATFORMS_OWN: Final = "platform"
LIGER: Final = "liger_kernel"

BEST_ON_GPU: Final[Mapping[str, tuple[str, ...]]] = {
    "rms_norm": ("liger", "compile"),
    "swiglu": ("compile",),
    "rotary": ("compile",),
    "split_qkv_rotary": ("compile",),
}
"""What ``auto`` takes on CUDA, the first that is there. Liger's gate and rotation take tensors of
their own, which costs a copy of what Megatron's layers have in one: a compiled graph reads it where
it lies, and moves three and two numbers where copy and kernel move seven and four."""


@attrs.frozen(kw_only=True)
class KernelOptions:
    """Options, set by ``plugins.<name>.<field>=<value>``."""

    kernel: str = attrs.field(default="auto", validator=attrs.validators.in_(KERNELS))
    """Which kernel: ``auto`` (the platform's best), ``torch`` (the plain formula, to find out
    whether a kernel is at fault), ``compile`` (the formula by torch.compile), ``liger`` (CUDA)."""


def problems(plugin: str, kernel: str, platform: str) -> list[str]:
    """Why a kernel cannot be had, a sentence each."""
    asked = f"{plugin}: plugins.{plugin}.kernel={kernel}"
    if kernel == "liger" and platform != "cuda":
        return [f"{asked} is for platform cuda, not {platform}; use auto, compile or torch"]
    if kernel == "liger" and not has_liger():
        return [f"{asked} needs the package liger-kernel; pip install liger-kernel, or use auto"]
    if kernel == "compile" and platform == "npu":
        return [f"{asked} has no compiler on platform npu; use auto or torch"]
    if kernel == "compile" and platform == "cpu" and (missing := missing_compiler()):
        problem = f"{asked} needs a C++ compiler ({missing}) on the PATH"
        return [f"{problem}; install one, set CXX to it, or use auto"]
    return []


def has_liger() -> bool:
    return importlib.util.find_spec(LIGER) is not None


def choose(operator: str, kernel: str, device_type: str) -> str:
    """The form of one operator: one of ``KERNELS`` without ``auto``, or the platform's own.

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
    """The operator as ``torch``, ``compile`` or ``liger`` computes it.

    In a graph of torch.compile every form is the plain composition, which that compiler fuses.
    """
    import torch

    module = {"split_qkv_rotary": "rotary"}.get(operator, operator)
    plain = getattr(
        importlib.import_module(f"ascend_run.ops.elementwise.{module}"), f"plain_{operator}"
    )
    if form == "torch":
        return plain
    if form == "liger":
        kernel = getattr(importlib.import_module(f"{__package__}.liger"), operator)
    else:
        # Its own graphs, so that another run in this process neither finds them nor uses up their
        # number.
        kernel = torch.compile(plain, recompile_limit=16, isolate_recompiles=True)

    @functools.wraps(plain)
    def run(*args: Any) -> Any:
        return plain(*args) if torch.compiler.is_compiling() else kernel(*args)

    return run


def replaced(ops: Any, kernel: str, device_type: str, *operators: str) -> Any:
    """The table with some operators in another form; the same table where that is the platform's.

    Args:
        ops: A ``PlatformOps``.
        kernel: Of ``KERNELS``.
    """
    forms = {name: choose(name, kernel, device_type) for name in operators}
    made = {name: in_form(name, form) for name, form in forms.items() if form != PLATFORMS_OWN}
    return attrs.evolve(ops, **made) if made else ops
