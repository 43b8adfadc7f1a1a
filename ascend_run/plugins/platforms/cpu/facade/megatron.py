"""Rows for Megatron's modules: the name ``torch`` in them, and what they imported from torch.

A module that uses ``device="cuda"``, or the current device's index, gets a view of torch whose
factories map these to the CPU. The view is a module with torch's own attributes, so attribute
access costs the same as with torch.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Final

import torch

from ascend_run.plugin_api import Patch

from .cuda import Stream, call_now, nothing
from .rows import row
from .tensors import is_cuda_device, on_cpu

MODULES_THAT_NAME_CUDA: Final = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.bert.bert_model",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel.bridge_communicator",
    "megatron.core.pipeline_parallel.combined_1f1b",
    "megatron.core.pipeline_parallel.fine_grained_activation_offload",
    "megatron.core.pipeline_parallel.hybrid_cp_schedule",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.pipeline_parallel.utils",
    "megatron.core.rerun_state_machine",
    "megatron.core.tensor_parallel.data",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.random",
    "megatron.core.tensor_parallel.utils",
    "megatron.core.timers",
    "megatron.core.transformer.attention",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.experimental_attention_variant.dsa",
    "megatron.core.transformer.module",
    "megatron.core.transformer.moe.experts",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.transformer.transformer_layer",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
"""Training modules of Megatron that name the CUDA device, by name or index, or pin memory; a test
checks that the list is complete."""

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
        kwargs.pop("pin_memory", None)  # raises an error without an accelerator
        return factory(*args, **kwargs)

    return make


class _AsType(type):
    """Metaclass of a proxy of a torch class, whose instances pass isinstance with the proxy."""

    stands_for: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.stands_for)


class CpuForCudaDevice(metaclass=_AsType):
    """``torch.device`` that maps a CUDA device, by name or index, to the CPU."""

    stands_for = torch.device

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        named = args[0] if args else kwargs.get("type", kwargs.get("device"))
        return torch.device("cpu") if is_cuda_device(named) else torch.device(*args, **kwargs)


class CpuForCudaGenerator(metaclass=_AsType):
    """``torch.Generator`` that is on the CPU if a CUDA device is requested."""

    stands_for = torch.Generator

    def __new__(cls, device: object = "cpu") -> Any:
        return torch.Generator(device=on_cpu(device))


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
    return torch.autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def torch_view() -> types.ModuleType:
    """Return a view of torch with its factories and device types mapped to the CPU."""
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


def megatron_rows() -> tuple[Patch, ...]:
    """Return the rows."""
    view = torch_view()
    random = "megatron.core.tensor_parallel.random"
    bound = "bound when the module was imported"
    return (
        *(
            row(f"{module}:torch", view, "names the CUDA device or pins memory itself")
            for module in MODULES_THAT_NAME_CUDA
        ),
        row(
            "megatron.core.transformer.moe.token_dispatcher:"
            "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
            Stream(),
            "made once for all dispatchers of the process; one on another platform may follow",
        ),
        row(f"{random}:_lazy_call", call_now, bound, same="torch.cuda:_lazy_call"),
        row(f"{random}:_lazy_init", nothing(), bound, same="torch.cuda:_lazy_init"),
    )
