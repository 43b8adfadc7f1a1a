"""Rows on ``torch.Tensor``: what Megatron asks of a tensor that it believes on the device."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from .substitution import Substitute, original

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


def is_cuda_device(device: Any) -> bool:
    """Whether a device argument names a CUDA device: ``"cuda"``, ``"cuda:1"``, an index ..."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(device: Any) -> Any:
    """A device argument with any CUDA device replaced by the CPU."""
    return torch.device("cpu") if is_cuda_device(device) else device


def _is_cuda(self: Tensor) -> bool:
    return self.device.type == "cpu"


def _cuda(self: Tensor, *_: Any, **__: Any) -> Tensor:
    return self


def _record_stream(self: Tensor, _stream: Any) -> None:
    """Memory is never reused behind a stream here."""


def _pin_memory(self: Tensor, *_: Any) -> Tensor:
    return self


def _to(plain: Any) -> Any:
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and is_cuda_device(args[0]):
            args = (on_cpu(args[0]), *args[1:])
        if kwargs and "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return plain(self, *args, **kwargs)

    return to


def _type(plain: Any) -> Any:
    def type_name(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return plain(self, dtype, *args, **kwargs)
        name = _TYPE_NAMES.get(self.dtype) if self.device.type == "cpu" else None
        return name or plain(self)

    return type_name


def tensor_substitutes() -> tuple[Substitute, ...]:
    """The rows; each is inherited by Parameter."""
    tensor = "torch:Tensor"
    return (
        Substitute(
            f"{tensor}.is_cuda",
            property(_is_cuda),
            "the MoE dispatcher brings its split sizes to the host only for device tensors",
        ),
        Substitute(f"{tensor}.cuda", _cuda, "Megatron moves batches, weights and hashes"),
        Substitute(f"{tensor}.to", _to(original(f"{tensor}.to")), "device given by index or name"),
        Substitute(
            f"{tensor}.type",
            _type(original(f"{tensor}.type")),
            "Megatron's optimizers take only tensors whose type names cuda",
        ),
        Substitute(f"{tensor}.record_stream", _record_stream, "side streams mark what they read"),
        Substitute(f"{tensor}.pin_memory", _pin_memory, "raises without an accelerator"),
    )
