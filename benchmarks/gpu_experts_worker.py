"""Time the feed-forward of experts on one GPU, forward and backward; prints one JSON line.

``--form ours``: the plugin ``gmm``. ``--form loop``: one expert after the other, each with
parameters of its own, as in Megatron's SequentialMLP. ``--form products``: the six grouped GEMMs
of ``gmm`` alone, by torch's ``grouped_mm``.
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
from torch.nn import functional as F

from ascend_run.ops.experts.compiled_swiglu import for_device
from ascend_run.ops.experts.expert_mlp import expert_mlp

# T tokens sorted by expert, X experts, H hidden size, F width of an expert

SIZES: Final = {"large": (32768, 4096, 1536), "tiny": (96, 16, 32)}
"""T, H and F."""
FORMS: Final = ("ours", "loop", "products")
ROUTINGS: Final = ("balanced", "skewed")

Step = Callable[[], tuple[Tensor, ...]]
"""The output, and the gradients of tokens, probabilities and weights: of fc1 [X, 2F, H] and fc2
[X, H, F], or of each expert's fc1 and then each expert's fc2."""


def counts_of(num_tokens: int, num_experts: int, routing: str) -> list[int]:
    """Tokens of each expert; skewed, the first has a quarter of all, the last none."""
    if routing == "balanced":
        return [num_tokens // num_experts] * num_experts
    weights = [1 / (1 + index) for index in range(num_experts - 1)]
    share = 0.75 * num_tokens / sum(weights[1:])
    rest = [int(weight * share) for weight in weights[1:]]
    return [num_tokens - sum(rest), *rest, 0]


class Problem:
    """Operands of every form."""

    def __init__(self, size: str, num_experts: int, routing: str, device: str) -> None:
        tokens, hidden, width = SIZES[size]
        generator = torch.Generator(device=device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, device=device, generator=generator)
            return (values / shape[-1] ** 0.5).to(torch.bfloat16)

        self.counts = counts_of(tokens, num_experts, routing)
        self.on_device = torch.tensor(self.counts, device=device)
        self.x = draw(tokens, hidden).requires_grad_()
        self.probs = torch.rand(tokens, device=device, generator=generator).requires_grad_()
        self.fc1 = draw(num_experts, 2 * width, hidden).requires_grad_()
        self.fc2 = draw(num_experts, hidden, width).requires_grad_()
        self.upstream = draw(tokens, hidden)


def ours(problem: Problem) -> Step:
    """Counts stay on the device, as the dispatchers give them to ``gmm`` there."""
    p = problem
    is_cuda = p.x.is_cuda
    # On a CPU, where this is only tried out, ``gmm`` takes counts of the host.
    counts = p.on_device if is_cuda else p.counts
    swiglu = for_device(p.x.device)

    def step() -> tuple[Tensor, ...]:
        out = expert_mlp(p.x, counts, p.probs, p.fc1, p.fc2, swiglu=swiglu)
        gradients = torch.autograd.grad(out, (p.x, p.probs, p.fc1, p.fc2), p.upstream)
        return out.detach(), *gradients

    return step


def loop(problem: Problem) -> Step:
    """The counts are read once; a layer would read them in every step."""
    p = problem
    fc1 = [w.detach().clone().requires_grad_() for w in p.fc1]
    fc2 = [w.detach().clone().requires_grad_() for w in p.fc2]

    def step() -> tuple[Tensor, ...]:
        outs = []
        parts = zip(p.x.split(p.counts), p.probs.split(p.counts), fc1, fc2, strict=True)
        for x, prob, up, down in parts:
            gate, value = F.linear(x, up).chunk(2, dim=-1)
            outs.append(F.linear(F.silu(gate) * value * prob.unsqueeze(-1).to(x.dtype), down))
        out = torch.cat(outs)
        dx, dprobs, *weights = torch.autograd.grad(out, (p.x, p.probs, *fc1, *fc2), p.upstream)
        return out.detach(), dx, dprobs, *weights

    return step


def products(problem: Problem) -> Step:
    """Forward twice, backward four times; what lies between has arbitrary values."""
    p = problem
    offs = p.on_device.cumsum(0, dtype=torch.int32)
    x, fc1, fc2, dy = p.x.detach(), p.fc1.detach(), p.fc2.detach(), p.upstream
    act, dhidden = (
        torch.randn(x.shape[0], width, device=x.device).to(x.dtype)
        for width in (fc2.shape[2], fc1.shape[1])
    )

    def step() -> tuple[Tensor, ...]:
        return (
            F.grouped_mm(x, fc1.transpose(1, 2), offs=offs),
            F.grouped_mm(act, fc2.transpose(1, 2), offs=offs),
            F.grouped_mm(dy, fc2, offs=offs),
            F.grouped_mm(dy.t(), act, offs=offs),
            F.grouped_mm(dhidden.t(), x, offs=offs),
            F.grouped_mm(dhidden, fc1, offs=offs),
        )

    return step


STEPS: Final[dict[str, Callable[[Problem], Step]]] = {
    "ours": ours,
    "loop": loop,
    "products": products,
}


def apart(problem: Problem) -> float:
    """Return the largest relative difference between ``gmm`` and the loop: of a tensor, or of the
    gradient of one expert's weight, relative to the mean one's if that is larger."""
    first, second = ours(problem)(), loop(problem)()
    count = len(first[3])
    pairs = [*zip(first[:3], second[:3], strict=True)]
    found = [_norm(mine, other) / _norm(other) for mine, other in pairs]
    for stack, others in ((first[3], second[3 : 3 + count]), (first[4], second[3 + count :])):
        mean = _norm(stack) / count**0.5
        for mine, other in zip(stack, others, strict=True):
            found.append(_norm(mine, other) / torch.maximum(_norm(other), mean))
    return float(torch.stack(found).max())  # nan if any is


def _norm(tensor: Tensor, other: Tensor | float = 0.0) -> Tensor:
    return (tensor.float() - other).norm()


def measure(step: Step, device: str, warmup: int, steps: int) -> float:
    """Median seconds of a forward and backward."""
    seconds = []
    for index in range(warmup + steps):
        _finish(device)
        begin = time.perf_counter()
        step()
        _finish(device)
        if index >= warmup:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--experts", type=int, required=True)
    parser.add_argument("--routing", choices=ROUTINGS, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    options = parser.parse_args(arguments)
    problem = Problem(options.size, options.experts, options.routing, options.device)
    seconds = measure(STEPS[options.form](problem), options.device, options.warmup, options.steps)
    result: dict[str, Any] = {"seconds": seconds, "device": None}
    if options.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
    if options.form == "ours":
        result["apart"] = apart(problem)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
