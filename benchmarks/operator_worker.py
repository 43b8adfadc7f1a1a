"""Time one fused operator, forward and backward, in a fresh process; prints one JSON line.

It needs torch and ``ascend_run.ops`` alone, so it runs where Liger is installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

# S sequence, B batch, H hidden size, F width of the feed-forward, N heads, D head width

SIZES: Final = {
    "large": {"S": 2048, "B": 4, "H": 2048, "F": 5504, "N": 16, "D": 128},
    "tiny": {"S": 8, "B": 2, "H": 16, "F": 24, "N": 2, "D": 8},
}
EPS: Final = 1e-5
OPERATORS: Final = ("rms_norm", "swiglu", "rotary")
FORMS: Final = ("ours", "eager", "liger")

Call = Callable[[], tuple[Tensor, ...]]


def leaves_of(operator: str, form: str, sizes: dict[str, int], device: str) -> list[Tensor]:
    """Inputs as the form's own users have them: Liger's gate and up, q and k are tensors apart."""
    s, b, h, f, n, d = (sizes[name] for name in "SBHFND")
    shapes: dict[str, list[tuple[int, ...]]] = {
        "rms_norm": [(s, b, h), (h,)],
        "swiglu": [(s, b, f), (s, b, f)] if form == "liger" else [(s, b, 2 * f)],
        "rotary": [(b, s, n, d)] * 2 if form == "liger" else [(s, b, 3 * n * d)],
    }
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(0)
    return [
        torch.randn(shape, device=device, generator=generator).to(dtype).requires_grad_()
        for shape in shapes[operator]
    ]


def tables(sizes: dict[str, int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, D]."""
    exponents = torch.arange(0, sizes["D"], 2, device=like.device) / sizes["D"]
    angles = torch.outer(torch.arange(sizes["S"], device=like.device), 10000.0**-exponents)
    whole = torch.cat((angles, angles), -1)
    return whole.cos().to(like.dtype), whole.sin().to(like.dtype)


def call_of(operator: str, form: str, sizes: dict[str, int], leaves: Sequence[Tensor]) -> Call:
    """A function that runs the operator forward."""
    if form == "liger":
        return _ligers_own(operator, sizes, leaves)
    from ascend_run.ops.kernels.operator_kernels import choose, in_form

    name = "split_qkv_rotary" if operator == "rotary" else operator
    kind = leaves[0].device.type
    # On a CPU, where this is only tried out, the best of a GPU is the compiled form.
    best = choose(name, "auto", "cuda") if kind == "cuda" else "compile"
    run: Callable[..., Any] = in_form(name, "torch" if form == "eager" else best)
    if operator == "rms_norm":
        return lambda: (run(*leaves, EPS),)
    if operator == "swiglu":
        return lambda: (run(*leaves),)
    angles, heads = tables(sizes, leaves[0]), (sizes["N"], 1, sizes["D"])
    return lambda: tuple(run(*leaves, *angles, heads, False))


def _ligers_own(operator: str, sizes: dict[str, int], leaves: Sequence[Tensor]) -> Call:
    """As Liger's own modules call it."""
    from liger_kernel.ops import (
        LigerRMSNormFunction,
        LigerRopeFunction,
        LigerSiLUMulFunction,
    )

    if operator == "rms_norm":
        return lambda: (LigerRMSNormFunction.apply(*leaves, EPS, 0.0, "llama", True),)
    if operator == "swiglu":
        return lambda: (LigerSiLUMulFunction.apply(*leaves),)
    cos, sin = (table.unsqueeze(0) for table in tables(sizes, leaves[0]))
    return lambda: LigerRopeFunction.apply(*(x.transpose(1, 2) for x in leaves), cos, sin)


def measure(call: Call, leaves: Sequence[Tensor], warmup: int, steps: int) -> dict[str, Any]:
    """Median seconds of a forward and backward."""
    upstream = [torch.randn_like(out) for out in call()]
    seconds = []
    for index in range(warmup + steps):
        for leaf in leaves:
            leaf.grad = None
        _finish(leaves[0])
        begin = time.perf_counter()
        # A kernel may write its gradient over the one that comes in.
        torch.autograd.backward(call(), [gradient.clone() for gradient in upstream])
        _finish(leaves[0])
        if index >= warmup:
            seconds.append(time.perf_counter() - begin)
    is_cuda = leaves[0].is_cuda
    return {
        "seconds": statistics.median(seconds),
        "device": torch.cuda.get_device_name() if is_cuda else None,
    }


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--operator", choices=OPERATORS, required=True)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    options = parser.parse_args(arguments)
    sizes = SIZES[options.size]
    leaves = leaves_of(options.operator, options.form, sizes, options.device)
    call = call_of(options.operator, options.form, sizes, leaves)
    print(json.dumps(measure(call, leaves, options.warmup, options.steps)))


if __name__ == "__main__":
    main()
