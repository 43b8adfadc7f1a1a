"""Rows on Megatron's own modules: the word ``torch`` in them, and what it assumes installed.

A module that writes ``device="cuda"`` is given a view of torch whose factories make that the CPU.
The view is a module with torch's own attributes, so looking one up costs what it costs in torch.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Final

import torch

from .cuda import call_now, nothing
from .substitution import Substitute
from .tensors import is_cuda_device, on_cpu

MODULES_THAT_NAME_CUDA: Final = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.combined_1f1b",
    "megatron.core.pipeline_parallel.fine_grained_activation_offload",
    "megatron.core.pipeline_parallel.hybrid_cp_schedule",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.pipeline_parallel.utils",
    "megatron.core.rerun_state_machine",
    "megatron.core.tensor_parallel.data",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
"""Training modules of Megatron that name the CUDA device or pin memory; a test keeps it whole."""

_FACTORIES: Final = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)  # raises without an accelerator
        return factory(*args, **kwargs)

    return make


class _AsType(type):
    """A stand-in for a class of torch that is constructed otherwise but means the same class."""

    stands_for: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.stands_for)


class CpuForCudaDevice(metaclass=_AsType):
    """``torch.device`` for which a CUDA device, by name or index, is the CPU."""

    stands_for = torch.device

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        named = args[0] if args else kwargs.get("type", kwargs.get("device"))
        return torch.device("cpu") if is_cuda_device(named) else torch.device(*args, **kwargs)


class CpuForCudaGenerator(metaclass=_AsType):
    """``torch.Generator`` that lives on the CPU where a CUDA device is asked for."""

    stands_for = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch.Generator(device=on_cpu(device))


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
    return torch.autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def torch_view() -> types.ModuleType:
    """A module that is torch, but for factories, ``device``, ``Generator`` and ``autocast``."""
    view = types.ModuleType("torch", "torch, with the CPU where CUDA is named")
    vars(view).update(vars(torch))
    vars(view).update({name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    vars(view).update(
        device=CpuForCudaDevice,
        Generator=CpuForCudaGenerator,
        autocast=_autocast,
        __getattr__=lambda name: getattr(torch, name),  # what torch loads on first use
    )
    return view


def megatron_substitutes() -> tuple[Substitute, ...]:
    """The rows; imports the modules they are about, which a run needs in any case."""
    from packaging.version import Version

    view = torch_view()
    random = "megatron.core.tensor_parallel.random"
    absent = "compared with a version even where the package is not installed"
    return (
        *(
            Substitute(f"{module}:torch", view, "names the CUDA device or pinned memory itself")
            for module in MODULES_THAT_NAME_CUDA
        ),
        Substitute(f"{random}:_lazy_call", call_now, "bound when the module was imported"),
        Substitute(f"{random}:_lazy_init", nothing(), "bound when the module was imported"),
        Substitute("megatron.core.utils:_te_version", Version("0"), absent),
        Substitute("megatron.core.utils:_fa_version", Version("0"), absent),
        Substitute(
            "megatron.core.transformer.moe.moe_utils:te_general_gemm",
            None,
            "used without being defined where Transformer Engine is not installed",
        ),
    )
