"""The compiled SwiGLU of experts against the formula in float64, and beside torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ascend_run.ops.experts.compiled_swiglu import CompiledSwiGlu, for_device
from ascend_run.ops.experts.expert_mlp import SwiGlu, expert_mlp
from ascend_run.testing.effects import count_operations
from ascend_run.testing.pool import GlooPool

H, WIDTH = 8, 16
pytestmark = pytest.mark.filterwarnings(  # inductor's own, when first imported
    "ignore:.*torch.jit.script_method:DeprecationWarning"
)


def operands(counts: list[int], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return [tokens, probs, fc1, fc2] that require gradients, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (sum(counts), H),
        (sum(counts),),
        (len(counts), 2 * WIDTH, H),
        (len(counts), H, WIDTH),
    ]
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [x.requires_grad_() for x in drawn], drawn[0].detach().flip(0)


def results(
    inputs: list[Tensor], dy: Tensor, counts: list[int], swiglu: SwiGlu
) -> tuple[Tensor, ...]:
    tokens, probs, fc1, fc2 = inputs
    out = expert_mlp(tokens, counts, probs, fc1, fc2, swiglu=swiglu)
    return out.detach(), *torch.autograd.grad(out, inputs, dy)


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((mine.double() - right).norm() / right.norm()) for mine, right in pairs]


def compared(dtype: torch.dtype) -> list[tuple[int, list[torch.dtype], list[float], list[float]]]:
    """Return for some numbers of tokens: calls of silu, dtypes of the results, and their errors and
    those of torch's operations. A job for a rank, where inductor is imported."""
    compiled, seen = CompiledSwiGlu(), []
    for counts in ([5, 0, 1, 7], [2, 9, 0, 3], [0, 1, 0, 0]):
        inputs, dy = operands(counts, dtype)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        exact = results(wide, dy.double(), counts, SwiGlu())
        plain = results(inputs, dy, counts, SwiGlu())
        with count_operations() as operations:
            found = results(inputs, dy, counts, compiled)
        apart = errors(found, exact), errors(plain, exact)
        seen.append((operations.get("silu", 0), [tensor.dtype for tensor in found], *apart))
    return seen


@pytest.mark.exhaustive(by=lambda dtype: [dtype] if dtype == torch.bfloat16 else [])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_it_is_as_near_as_torchs_operations(
    gloo_pool: GlooPool, dtype: torch.dtype
) -> None:
    """For other numbers of tokens too, and for one; it is in graphs, where silu is not seen."""
    (seen,) = gloo_pool.run(compared, 1, dtype, timeout=100)
    assert len(seen) == 3
    for calls, dtypes, ours, torchs in seen:
        assert calls == 0
        assert dtypes == [dtype] * 5
        for mine, other in zip(ours, torchs, strict=True):
            assert mine <= max(1.5 * other, torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_dtypes_are_torchs_operations_bit_for_bit(dtype: torch.dtype) -> None:
    counts = [5, 0, 1, 7]
    inputs, dy = operands(counts, dtype)
    expected = results(inputs, dy, counts, SwiGlu())
    for mine, right in zip(results(inputs, dy, counts, CompiledSwiGlu()), expected, strict=True):
        assert torch.equal(mine, right)


def test_only_a_gpu_gets_it() -> None:
    assert type(for_device(torch.device("cpu"))) is SwiGlu
