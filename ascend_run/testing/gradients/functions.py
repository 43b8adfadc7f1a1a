"""Compare the backward of autograd functions with differences of their forward.

Calls are recorded while a run computes its gradients, and replayed at their own inputs, one rank
only: what a function that communicates must return is a matter of convention.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ascend_run.plugin_api import AttentionSpec

from .differences import Derivative, direction, slopes

MOST_CALLS: Final = 2
"""Calls of one function that are replayed: those whose inputs have other shapes."""
ESTIMATES: Final = "estimates_gradient"
"""Attribute of a function whose backward is by design not the derivative (straight-through): the
reason."""
_OTHERS: Final = ("torch.", "megatron.")
"""Packages whose functions are not checked, some of which add losses in backward."""

Function = type[torch.autograd.Function]


@attrs.frozen
class FunctionCall:
    """One call of an autograd function."""

    function: Function
    arguments: tuple[Any, ...]
    """Tensors are copies."""
    is_trained: tuple[bool, ...]
    """For each argument, whether it is a tensor that required a gradient."""

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def argument_name(self, index: int) -> str:
        names = [*inspect.signature(self.function.forward).parameters]
        names = names[int(_takes_context(self.function)) :]
        return names[index] if index < len(names) else str(index)


@contextmanager
def recorded_calls(most: int = MOST_CALLS) -> Iterator[list[FunctionCall]]:
    """Record calls of all autograd functions that are defined by now, except torch's and
    Megatron's."""
    calls: list[FunctionCall] = []
    shapes: set[object] = set()

    def record(function: Function, arguments: tuple[Any, ...]) -> None:
        seen = (function, *(_shape(argument) for argument in arguments))
        if seen in shapes or sum(call.function is function for call in calls) >= most:
            return
        shapes.add(seen)
        copies = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, arguments)
        trained = tuple(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        calls.append(FunctionCall(function, copies, trained))

    with _watched([*_functions()], record):
        yield calls


@contextmanager
def recorded_estimates() -> Iterator[dict[str, None]]:
    """Record which functions are called that declare that they estimate the gradient: their names
    with the reasons."""
    found: dict[str, None] = {}

    def record(function: Function, _: tuple[Any, ...]) -> None:
        reason = getattr(function, ESTIMATES)
        found[f"{function.__module__}.{function.__qualname__}: {reason}"] = None

    with _watched([f for f in _functions() if hasattr(f, ESTIMATES)], record):
        yield found


@contextmanager
def _watched(
    functions: Sequence[Function], see: Callable[[Function, tuple[Any, ...]], None]
) -> Iterator[None]:
    """Call ``see`` with each call of these functions."""
    replaced = [(function, function.__dict__["forward"]) for function in functions]
    for function, inner in replaced:
        cast("Any", function).forward = staticmethod(_seen(function, inner.__func__, see))
    try:
        yield
    finally:
        for function, inner in replaced:
            cast("Any", function).forward = inner


def _functions() -> Iterator[Function]:
    """Yield every class of autograd functions with a forward of its own."""
    classes = [*torch.autograd.Function.__subclasses__()]
    seen: set[type] = set()
    while classes:
        found = classes.pop()
        if found in seen:
            continue
        seen.add(found)
        classes += found.__subclasses__()
        has_forward = isinstance(found.__dict__.get("forward"), staticmethod)
        if has_forward and not f"{found.__module__}.".startswith(_OTHERS):
            yield found


def _seen(function: Function, forward: Any, see: Any) -> Any:
    takes_context = _takes_context(function)

    def seen(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            see(function, arguments[1:] if takes_context else arguments)
        return forward(*arguments)

    return seen


def _takes_context(function: Function) -> bool:
    """Whether forward gets the context; else ``setup_context`` does."""
    return function.setup_context is torch.autograd.Function.setup_context


def _shape(argument: Any) -> object:
    leaves = tree_leaves(argument)
    return tuple((*x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves)


def function_derivatives(calls: Sequence[FunctionCall]) -> Iterator[Derivative]:
    """Replay calls and yield a derivative for each of their inputs that was trained.

    A function that declares that it estimates the gradient is left out, and so is attention, which
    ``kernels`` compares. One that returns something else in a second call, or that cannot be called
    apart from the run, is not measured.
    """
    for call in calls:
        is_attention = any(isinstance(x, AttentionSpec) for x in call.arguments)
        if hasattr(call.function, ESTIMATES) or is_attention or not any(call.is_trained):
            continue
        try:
            yield from _Replay(call).derivatives()
        except Exception:  # it depends on the state of the run, such as its own earlier calls
            yield _unmeasured(call)


class _Replay:
    """Evaluates the product of a function's outputs and random weights."""

    def __init__(self, call: FunctionCall) -> None:
        self.call, self.size = call, 0.0
        self.inputs = [i for i, trained in enumerate(call.is_trained) if trained]
        generator = torch.Generator().manual_seed(zlib.crc32(call.name.encode()))
        self.arguments = [
            _varied(x, generator) if i in self.inputs else x for i, x in enumerate(call.arguments)
        ]
        self.leaves = [
            x.detach().clone().requires_grad_() if i in self.inputs else x
            for i, x in enumerate(self.arguments)
        ]
        out = self._outputs(self.leaves)
        self.differentiable = [i for i, x in enumerate(out) if x.requires_grad]
        self.weights = [
            torch.randn(out[i].shape, generator=generator, dtype=torch.float64)
            for i in self.differentiable
        ]

    def derivatives(self) -> list[Derivative]:
        first, second = self.value(self.leaves), self.value(self.leaves)
        if not torch.equal(first, second):
            return [_unmeasured(self.call)]
        leaves = [self.leaves[i] for i in self.inputs]
        gradients = torch.autograd.grad(first, leaves, allow_unused=True)
        return [self._derivative(*pair) for pair in zip(self.inputs, gradients, strict=True)]

    def value(self, arguments: Sequence[Any]) -> Tensor:
        out = self._outputs(arguments)
        terms = [
            weight.to(out[i].device) * out[i].double()
            for weight, i in zip(self.weights, self.differentiable, strict=True)
        ]
        self.size = float(sum(term.detach().abs().sum() for term in terms))
        return torch.stack([term.sum() for term in terms]).sum()

    def _outputs(self, arguments: Sequence[Any]) -> list[Tensor]:
        # Copies, since a function may change its inputs in place.
        copies = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, [*arguments])
        leaves = tree_leaves(cast("Any", self.call.function).apply(*copies))
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    def _derivative(self, index: int, gradient: Tensor | None) -> Derivative:
        tensor: Tensor = self.arguments[index]
        along = direction(tensor, gradient, torch.Generator().manual_seed(index)).to(tensor.dtype)

        def at(distance: float) -> tuple[float]:
            moved = [*self.arguments]
            moved[index] = tensor + distance * along
            with torch.no_grad():
                return (float(self.value(moved)),)

        (slope,) = slopes(at, (self.size,))
        return Derivative(
            name=f"its input '{self.call.argument_name(index)}'",
            of=self.call.name,
            gradient=0.0 if gradient is None else float((gradient * along).sum()),
            slope=slope.value,
            bound=slope.bound,
            is_measured=slope.is_measured,
        )


def _varied(x: Tensor, generator: torch.Generator) -> Tensor:
    """Give a constant input other values: a factor that is missing in backward cannot be seen
    where it is 1, as the weight of a norm is before the first step."""
    if x.numel() < 2 or bool((x != x.flatten()[0]).any()):
        return x
    noise = torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return x + (noise - 0.5).to(x) / 4


def _unmeasured(call: FunctionCall) -> Derivative:
    return Derivative(
        name="its inputs", of=call.name, gradient=0.0, slope=0.0, bound=math.inf, is_measured=False
    )
