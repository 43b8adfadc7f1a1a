"""Compile a Megatron transformer layer around the parts that a graph cannot hold.

These run eagerly between the graphs: attention kernels (which may communicate and save what they
choose for backward), experts and their dispatcher (whose sizes change with the routing), linears
that communicate, dropout (so that it draws the same numbers as without a graph, from the generators
that a checkpoint holds), and every link around a forward that another plugin marks as not
compilable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ascend_run.ops.kernels.own_graphs import with_own_graphs
from ascend_run.plugin_api import ForwardLink, chain_of
from ascend_run.types.forward import Forward

from . import PARTS

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from . import CompileConfig

_LINEARS: Final = (ColumnParallelLinear, RowParallelLinear)


class LayerCompiler:
    """Compile the layers of one rank with one set of options, and count the graphs."""

    def __init__(self, options: CompileConfig) -> None:
        self._regions = options.regions
        self._before = _counts()
        # One compiled function for all layers, so that they share graphs.
        self._run = with_own_graphs(
            _call,
            limit=options.max_graphs,
            mode=None if options.mode == "default" else options.mode,
            dynamic={"auto": None, "yes": True, "no": False}[options.dynamic],
            fullgraph=options.fullgraph,
        )

    def links(self, layer: nn.Module) -> dict[str, ForwardLink]:
        """Return links that compile a layer or its parts, and exclude what a graph cannot hold."""
        if self._regions == "parts":
            return self._links_of_parts(layer)
        links = dict.fromkeys(_outside(layer), ForwardLink(wrap=_eager, compilable=False))
        if cast("TransformerLayer", layer).hidden_dropout > 0.0:
            for name in ("self_attn_bda", "mlp_bda"):
                add = getattr(layer, name)
                if isinstance(add, nn.Module):  # with a norm, or scaled
                    links[name] = ForwardLink(wrap=_dropout_outside, compilable=False)
                else:
                    setattr(layer, name, _dropout_outside(add))
        return links | _local_linears(layer) | {"": ForwardLink(wrap=self._graph, compilable=True)}

    def _links_of_parts(self, layer: nn.Module) -> dict[str, ForwardLink]:
        links: dict[str, ForwardLink] = {}
        for name in PARTS:
            part = getattr(layer, name)
            if not any(map(_stays_outside, part.modules())):
                links |= {f"{name}.{inner}": link for inner, link in _local_linears(part).items()}
                links[name] = ForwardLink(wrap=partial(self._whole, part), compilable=True)
        return links

    def _graph(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            named = {name: _as_new(value) for name, value in kwargs.items()}
            return self._run(forward, *map(_as_new, args), **named)

        return run

    def _whole(self, part: nn.Module, forward: Forward) -> Forward:
        """Compile a part if every module in it can be compiled."""
        inside = (module for module in part.modules() if module is not part)
        return self._graph(forward) if all(chain_of(m).compilable for m in inside) else forward

    def readings(self) -> Mapping[str, float]:
        """Return the graphs compiled and the graph breaks since this run was built."""
        now = _counts()
        return {name: float(now[name] - self._before[name]) for name in now}


def _as_new(value: Any) -> Any:
    """Return a contiguous tensor with the strides of a new one.

    Graphs are compiled for strides, also for those that do not matter, of axes with one element:
    with one sample, those of the embedding's output are not those of a layer's.
    """
    if not isinstance(value, Tensor) or not value.is_contiguous():
        return value
    size = value.numel()
    for length, stride in zip(value.shape, value.stride(), strict=True):
        size //= max(1, length)
        if stride != size:
            return value.flatten().view(value.shape)
    return value


def _counts() -> dict[str, int]:
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def _outside(layer: nn.Module) -> Iterator[str]:
    """Yield the names of the outermost modules that no graph can hold."""
    waiting = [*layer.named_children()]
    while waiting:
        name, module = waiting.pop()
        if _stays_outside(module):
            yield name
        else:
            waiting.extend((f"{name}.{below}", held) for below, held in module.named_children())


def _stays_outside(module: nn.Module) -> bool:
    if hasattr(module, "kernel") or hasattr(module, "router"):
        return True
    return isinstance(module, _LINEARS) and not _is_local(module)


def _is_local(linear: ColumnParallelLinear | RowParallelLinear) -> bool:
    assert linear.tp_group is not None  # Megatron fills it in
    return bool(linear.tp_group.size() == 1)


def _local_linears(part: nn.Module) -> dict[str, ForwardLink]:
    """Return links for the linears whose matmul needs no other rank."""
    return {
        name: ForwardLink(wrap=partial(_local_matmul, linear), compilable=True)
        for name, linear in part.named_modules()
        if isinstance(linear, _LINEARS) and type(linear) in _LINEARS and _is_local(linear)
    }


def _local_matmul(linear: nn.Module, forward: Forward) -> Forward:
    """Replace Megatron's forward by a matmul that a graph can hold.

    Megatron's forward is an autograd function that handles process groups. Any other forward stays
    out of the graph.
    """
    is_megatrons = getattr(forward, "__func__", None) is type(linear).forward
    return MethodType(_matrix_product, linear) if is_megatrons else _eager(forward)


def _eager(forward: Forward) -> Forward:
    apart: Forward = torch.compiler.disable(forward)
    return apart


def _matrix_product(
    self: Any, input_: Tensor, weight: Tensor | None = None, *unused: Any, **ignored: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute Megatron's linear on one rank."""
    weight = self.weight if weight is None else weight
    if self.skip_bias_add:
        return F.linear(input_, weight), self.bias
    return F.linear(input_, weight, self.bias), None


def _dropout_outside(bias_dropout_add: Callable[..., Any]) -> Callable[..., Any]:
    """Run Megatron's bias-dropout-residual addition of a layer between the graphs."""

    def choose(training: bool, fused: bool) -> Callable[..., Any]:
        def add(*args: Any) -> Any:
            return bias_dropout_add(training, fused)(*args)

        return _eager(add)

    return choose


def _call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)
