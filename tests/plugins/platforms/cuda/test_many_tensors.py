"""The optimizer's steps over many tensors, against Megatron's own, one tensor after another."""

from __future__ import annotations

import math
import warnings
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_run.core.hooks import Hooks
from ascend_run.core.patches import applied_patches
from ascend_run.plugins.platforms.cuda import Cuda
from ascend_run.plugins.platforms.cuda.many_tensors import (
    AT_ONCE,
    copy_each,
    copy_gradients_to_main,
    l2_norm,
)

NOOP = torch.zeros(1, dtype=torch.int)
COUNT = 2 * AT_ONCE + 3


class Reads(TorchDispatchMode):
    """Counts what reaches the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(index % 5 + 1, 7, generator=generator, dtype=torch.float64).to(dtype)
        for index in range(COUNT)
    ]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
)
def test_the_norm_is_that_of_all_and_is_not_read(dtype: torch.dtype, tolerance: float) -> None:
    given = tensors(dtype)
    with Reads() as reads:
        norm, of_each = l2_norm(2048, NOOP, [given], False)
    exact = math.fsum(x * x for tensor in given for x in tensor.double().flatten().tolist()) ** 0.5
    assert (norm.shape, norm.dtype, of_each) == ((1,), torch.float32, None)
    assert abs(norm.item() - exact) <= tolerance * exact
    assert reads.count == 0


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flag", [None, torch.ones(1, dtype=torch.int)])
def test_copies_are_those_of_each(
    source: torch.dtype, target: torch.dtype, flag: torch.Tensor | None
) -> None:
    given = tensors(source)
    given[0][0, :2] = torch.tensor([math.inf, math.nan])
    targets = [torch.zeros_like(tensor, dtype=target) for tensor in given]
    copy_each(given, targets, flag)
    for tensor, copied in zip(given, targets, strict=True):
        torch.testing.assert_close(copied, tensor.to(target), rtol=0, atol=0, equal_nan=True)
    assert flag is None or flag.item() == 0


def optimizer_of(places: str) -> Any:
    """Groups of an optimizer: gradients in ``.grad``, in ``.main_grad``, or none."""

    def model(tensor: torch.Tensor, index: int) -> Any:
        parameter = torch.nn.Parameter(tensor)
        if index % 4 != 3 and places == "grad":
            parameter.grad = tensor.detach() * 3
        elif places != "grad":
            parameter.main_grad = (tensor.detach() * 5).to(getattr(torch, places))
        return parameter

    models = [model(tensor, index) for index, tensor in enumerate(tensors(torch.bfloat16))]
    mains = [torch.nn.Parameter(m.detach().float()) for m in models]
    alone = torch.nn.Parameter(torch.ones(3))
    alone.main_grad = torch.arange(3.0)
    return SimpleNamespace(
        float16_groups=[models[:5], models[5:]],
        fp32_from_float16_groups=[mains[:5], mains[5:]],
        fp32_from_fp32_groups=[[alone]],
    )


@pytest.mark.parametrize("places", ["grad", "bfloat16", "float32"])
def test_main_gradients_are_those_of_megatron(places: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # Megatron's, of absent packages
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as Megatrons

    ours, theirs = optimizer_of(places), optimizer_of(places)
    copy_gradients_to_main(ours)
    Megatrons._copy_model_grads_to_main_grads(theirs)
    for group in ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups"):
        flat = (chain(*getattr(groups, group)) for groups in (ours, theirs))
        for mine, other in zip(*flat, strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                assert mine.grad.dtype == other.grad.dtype == torch.float32
                assert torch.equal(mine.grad, other.grad)
                assert (mine.grad is getattr(mine, "main_grad", None)) == (
                    other.grad is getattr(other, "main_grad", None)
                )


def test_the_patches_fit_the_installed_megatron_and_are_undone() -> None:
    with applied_patches(Hooks([Cuda()])):
        from megatron.core.optimizer import clip_grads, optimizer

        assert clip_grads.l2_norm_impl is l2_norm
        assert optimizer._multi_tensor_copy_this_to_that is copy_each
        patched = optimizer.Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads
        assert patched is copy_gradients_to_main
    assert clip_grads.l2_norm_impl is not l2_norm


class OnDevice(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.parametrize("kind", [torch.Tensor, OnDevice])
def test_gradients_of_each_dtype_are_scaled_by_a_tensor(kind: type[torch.Tensor]) -> None:
    """The factor is not rounded to the gradients' dtype; with a GPU, there neither."""
    with warnings.catch_warnings(action="ignore"):
        from ascend_run.core.train.data_parallel import LocalGradients

    device = "cuda" if kind is OnDevice and torch.cuda.is_available() else "cpu"
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    module = torch.nn.ParameterList(
        [torch.nn.Parameter(t.to(device)) for d in dtypes for t in tensors(d)]
    )
    for parameter in module:
        parameter.grad = parameter.detach() * 3
    before = [p.grad.clone() for p in module]
    factor = torch.tensor(1 / 3, device=device)
    LocalGradients.scale_gradients(
        SimpleNamespace(module=module),  # type: ignore[arg-type]
        factor.as_subclass(kind),
    )
    for parameter, gradient in zip(module, before, strict=True):
        wide = torch.promote_types(gradient.dtype, torch.float32)
        exact = gradient.to(wide) * factor.to(wide)
        assert torch.equal(parameter.grad, exact.to(gradient.dtype))
