"""Linear layers on NF4 weights, against ``F.linear`` on the dequantised weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_run.ops.linear import nf4_linear as module
from ascend_run.ops.linear.nf4 import Nf4, compress, dequantise, quantise
from ascend_run.ops.linear.nf4_linear import nf4_linear
from tests.support.limited_memory import LimitedMemory

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def quantised(outputs: int, inputs: int, *, compressed: bool = True) -> Nf4:
    torch.manual_seed(0)
    weight = quantise(torch.randn(outputs, inputs))
    return compress(weight) if compressed else weight


@pytest.mark.parametrize("compressed", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("shape", [(96,), (7, 96), (5, 3, 96), (0, 96)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_gradient_equal_those_of_a_dequantised_weight(
    dtype: torch.dtype, shape: tuple[int, ...], compressed: bool
) -> None:
    weight = quantised(33, 96, compressed=compressed)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    upstream = torch.randn((*shape[:-1], 33), dtype=dtype)
    want = F.linear(x, dequantise(weight, dtype))
    got = nf4_linear(x, weight)
    assert got.dtype is dtype
    assert torch.equal(got, want)
    (want_dx,) = torch.autograd.grad(want, x, upstream)
    (got_dx,) = torch.autograd.grad(got, x, upstream)
    assert got_dx.shape == x.shape
    assert torch.equal(got_dx, want_dx)


def test_the_gradient_is_that_of_finite_differences() -> None:
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    weight = quantised(8, 16)
    assert torch.autograd.gradcheck(lambda x: nf4_linear(x, weight), x)


def test_a_gradient_in_another_layout_is_taken() -> None:
    weight = quantised(33, 96)
    x = torch.randn(4, 5, 96, requires_grad=True)
    upstream = torch.randn(33, 5, 4).permute(2, 1, 0)
    (got,) = torch.autograd.grad(nf4_linear(x, weight), x, upstream)
    (want,) = torch.autograd.grad(nf4_linear(x, weight), x, upstream.contiguous())
    assert torch.equal(got, want)


def test_nothing_is_saved_and_no_dequantised_weight_is_held() -> None:
    """After the forward only the output lives; one dequantised weight at a time before that and
    in backward."""
    weight = quantised(1024, 2048)
    x = torch.randn(2, 2048, requires_grad=True)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with LimitedMemory() as memory, saved_tensors_hooks(save, lambda tensor: tensor):
        out = nf4_linear(x, weight)
        assert memory.allocated() == out.untyped_storage().nbytes()
        out.sum().backward()
    assert not saved
    assert 1 <= memory.peak / (4 * 1024 * 2048) < 1.5


class Matmuls(TorchDispatchMode):
    """Records the names of matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function._opname in ("mm", "addmm", "bmm"):
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def test_the_weight_has_no_gradient_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """One matmul in forward and one in backward; the weight is dequantised in each."""
    calls: list[torch.dtype] = []

    def counted(weight: Nf4, dtype: torch.dtype) -> Tensor:
        calls.append(dtype)
        return dequantise(weight, dtype)

    monkeypatch.setattr(module, "dequantise", counted)
    x = torch.randn(3, 96, requires_grad=True)
    with Matmuls() as matmuls:
        nf4_linear(x, quantised(33, 96)).sum().backward()
    assert matmuls.names == ["mm", "mm"]
    assert calls == [torch.float32, torch.float32]


@pytest.mark.parametrize("weight", [(33, 95), (96,), (1, 33, 96)], ids=str)
def test_a_weight_of_another_shape_is_refused(weight: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"an input of shape \(3, 96\) and a quantised weight of"):
        nf4_linear(torch.ones(3, 96), quantise(torch.ones(weight)))
