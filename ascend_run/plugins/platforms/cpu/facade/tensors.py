"""Rows for ``torch.Tensor``: what Megatron calls on tensors that it expects on the device.

torch accepts an integer as a device too, but it means the accelerator, which a CPU build of torch
does not have: so every function that takes a device is wrapped.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from ascend_run.plugin_api import Patch

from .rows import row

_TYPE_NAMES: Final = {
    torch.float64: "torch.cuda.DoubleTensor",
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.uint8: "torch.cuda.ByteTensor",
    torch.int8: "torch.cuda.CharTensor",
    torch.int16: "torch.cuda.ShortTensor",
    torch.int32: "torch.cuda.IntTensor",
    torch.int64: "torch.cuda.LongTensor",
    torch.bool: "torch.cuda.BoolTensor",
}


def is_cuda_device(device: object) -> bool:
    """Return whether a device argument names a CUDA device, as ``"cuda"``, ``"cuda:1"`` or 1."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(device: object) -> Any:
    """Replace any CUDA device in a device argument by the CPU."""
    return torch.device("cpu") if is_cuda_device(device) else device


def _is_cuda(self: Tensor) -> bool:
    return self.device.type == "cpu"


def _cuda(self: Tensor, *_: Any, **__: Any) -> Tensor:
    return self


def _record_stream(self: Tensor, _stream: object) -> None:
    """Do nothing: memory is never reused by another stream here."""


def _pin_memory(self: Tensor, *_: Any) -> Tensor:
    return self


def _to(plain: Any) -> Any:
    @functools.wraps(plain)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda_device(args[0]):
            args = (on_cpu(args[0]), *args[1:])
        if kwargs and "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return plain(self, *args, **kwargs)

    return to


def _new(plain: Any) -> Any:
    @functools.wraps(plain)
    def make(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        out: Tensor = plain(self, *args, **kwargs)
        return out

    return make


def _type(plain: Any) -> Any:
    def type_name(self: Tensor, dtype: object = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return plain(self, dtype, *args, **kwargs)
        name = _TYPE_NAMES.get(self.dtype) if self.device.type == "cpu" else None
        return name or plain(self)

    return type_name


def tensor_rows() -> tuple[Patch, ...]:
    """Return the rows; Parameter inherits those of Tensor."""
    tensor = "torch:Tensor"
    return (
        row(
            f"{tensor}.is_cuda",
            property(_is_cuda),
            "the MoE dispatcher copies its split sizes to the host only for device tensors",
        ),
        row(f"{tensor}.cuda", _cuda, "Megatron moves batches, weights and hashes"),
        *(
            row(f"{owner}.to", _to, "device given by index or name", wraps=True)
            for owner in (tensor, "torch.nn:Module")
        ),
        *(
            row(
                f"{tensor}.{name}",
                _new,
                "device given by index or name, as for what the dispatcher receives",
                wraps=True,
            )
            for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
        ),
        row(
            f"{tensor}.type",
            _type,
            "Megatron's optimizers take only tensors whose type names cuda",
            wraps=True,
        ),
        row(f"{tensor}.record_stream", _record_stream, "side streams mark what they read"),
        row(f"{tensor}.pin_memory", _pin_memory, "raises without an accelerator"),
    )
