"""Compare the backward of attention kernels with differences of their forward.

The contract is called directly, with each feature that the kernel declares. Several ranks of a
context-parallel kernel evaluate the sum over ranks; each moves its own shards.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from ascend_run.plugin_api import (
    AttentionFeatures,
    AttentionKernel,
    AttentionSpec,
    Dropout,
    Mask,
    PositionBias,
)
from ascend_run.plugin_api import contracts as c

from .differences import Derivative, direction, slopes

# S queries, J keys, B batch, N query heads, G key-value heads, D width of q and k, E width of v

_S: Final = 12
_B: Final = 2
_SCALE: Final = 0.4


@attrs.frozen(kw_only=True)
class Problem:
    """Shapes and features of one call."""

    label: str
    needs: tuple[str, ...] = ()
    """Fields of AttentionFeatures."""
    heads: int = 4
    groups: int = 2
    keys: int = _S
    value_width: int = 8
    mask: Mask = attrs.field(factory=Mask)
    bias: tuple[int, ...] | None = None
    position_bias: bool = False
    sinks: bool = False
    softcap: float | None = None
    dropout: Dropout | None = None
    packed: bool = False

    def draw(self) -> tuple[dict[str, Tensor], AttentionSpec]:
        """Return q, k and v, with bias and sinks if there are any, and the spec without these."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.label.encode()))

        def tensor(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        batch = () if self.packed else (_B,)
        drawn = {
            "q": tensor(_S, *batch, self.heads, 8),
            "k": tensor(self.keys, *batch, self.groups, 8),
            "v": tensor(self.keys, *batch, self.groups, self.value_width),
        }
        if self.bias is not None:
            drawn["bias"] = tensor(*self.bias)
        if self.sinks:
            drawn["sinks"] = tensor(self.heads)
        slopes_N = torch.tensor([(3 + n) / 16 for n in range(self.heads)], dtype=torch.float64)
        spec = AttentionSpec(
            scale=_SCALE,
            mask=self.mask,
            position_bias=PositionBias(slopes=slopes_N) if self.position_bias else None,
            softcap=self.softcap,
            dropout=self.dropout,
        )
        return drawn, spec


_ALL: Final = (
    Problem(label="grouped queries"),
    Problem(label="one key-value head", groups=1),
    Problem(label="equal head counts", groups=4),
    Problem(label="no causal mask", mask=Mask(causal=False)),
    Problem(label="a window", needs=("window",), mask=Mask(window=(4, 0))),
    Problem(label="documents", needs=("documents",), mask=Mask(document_ends=(5, 9))),
    Problem(label="a bias", needs=("bias",), bias=(_B, 4, _S, _S)),
    Problem(label="a bias of heads and keys", needs=("bias",), bias=(4, 1, _S)),
    Problem(label="a position bias", needs=("position_bias",), position_bias=True),
    Problem(label="sinks", needs=("sinks",), sinks=True),
    Problem(label="a softcap", needs=("softcap",), softcap=1.3),
    Problem(label="dropout", needs=("dropout",), dropout=Dropout(probability=0.3, seed=7)),
    Problem(label="packed sequences", needs=("packed",), packed=True),
    Problem(label="more keys", needs=("unequal_lengths",), keys=20, mask=Mask(query_start=8)),
    Problem(label="narrow values", needs=("unequal_widths",), value_width=3),
    Problem(label="wide values", needs=("unequal_widths",), value_width=11),
    Problem(
        label="softcap, sinks and window",
        needs=("softcap", "sinks", "window"),
        softcap=1.3,
        sinks=True,
        mask=Mask(window=(5, 0)),
    ),
)
_ONE_RANK: Final = frozenset({"bias", "packed", "unequal_lengths"})
"""Features whose calls look different for a kernel that gets a shard of the sequence."""


def problems_of(features: AttentionFeatures, num_ranks: int = 1) -> Iterator[Problem]:
    """Yield the problems that a kernel with these features solves."""
    able = features.names() - (_ONE_RANK if num_ranks > 1 else frozenset())
    yield from (problem for problem in _ALL if able.issuperset(problem.needs))


def first_kernel(bundle: c.ModelBundle) -> AttentionKernel:
    """Return the attention kernel of a model's first layer, with all that wraps it."""
    from ascend_run.core.model.attention import CoreAttention

    modules = (module for chunk in bundle.chunks for module in chunk.modules())
    return next(module.kernel for module in modules if isinstance(module, CoreAttention))


def kernel_derivatives(kernel: AttentionKernel) -> Iterator[Derivative]:
    """Yield a derivative for each input of each problem that a kernel solves."""
    for problem in problems_of(kernel.features, _num_ranks()):
        name = f"the attention of {type(kernel).__name__} with {problem.label}"
        yield from _Solved(kernel, problem).derivatives(name)


class _Solved:
    """Evaluates the product of a kernel's output and random weights."""

    def __init__(self, kernel: AttentionKernel, problem: Problem) -> None:
        self.kernel = kernel
        self.inputs, self.spec = problem.draw()
        generator = torch.Generator().manual_seed(_rank())
        shape = (*self.inputs["q"].shape[:-1], problem.value_width)
        self.weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.size = 0.0

    def derivatives(self, name: str) -> Iterator[Derivative]:
        gradients = self._gradients()
        for index, (key, gradient) in enumerate(zip(self.inputs, gradients, strict=True)):
            before = self.inputs[key]
            generator = torch.Generator().manual_seed(100 * _rank() + index)
            along = direction(before, gradient, generator)

            def at(
                distance: float, key: str = key, before: Tensor = before, along: Tensor = along
            ) -> tuple[float]:
                return (self._value({**self.inputs, key: before + distance * along}),)

            (slope,) = slopes(at, (self.size,))
            yield Derivative(
                name=key,
                of=name,
                gradient=_summed((gradient * along).sum()),
                slope=slope.value,
                bound=slope.bound,
                is_measured=slope.is_measured,
            )

    def _gradients(self) -> tuple[Tensor, ...]:
        spec, (q, k, v) = self._call(self.inputs)
        out: Tensor | None
        lse: Tensor | None
        with torch.no_grad():
            out, lse, saved = self.kernel.forward(q, k, v, spec)
            self.size = _summed((out * self.weights).abs().sum())
            named = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
            q, k, v, out, lse = (
                tensor if key in self.kernel.backward_reads else None
                for key, tensor in named.items()
            )
            return self.kernel.backward(self.weights, q, k, v, out, lse, saved, spec)

    def _value(self, inputs: Mapping[str, Tensor]) -> float:
        spec, (q, k, v) = self._call(inputs)
        with torch.no_grad():
            return _summed((self.kernel.forward(q, k, v, spec).out * self.weights).sum())

    def _call(self, inputs: Mapping[str, Tensor]) -> tuple[AttentionSpec, tuple[Any, ...]]:
        spec = attrs.evolve(self.spec, bias=inputs.get("bias"), sinks=inputs.get("sinks"))
        return spec, (inputs["q"], inputs["k"], inputs["v"])


def _summed(value: Tensor) -> float:
    total = value.detach().clone()
    if _num_ranks() > 1:
        dist.all_reduce(total)
    return float(total)


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
