"""A Megatron transformer layer, compiled around what a graph cannot hold.

What stays outside runs as it always does, between the graphs: attention kernels (which may
exchange messages and keep what they like for backward), experts and their dispatcher (whose sizes
change with the routing), linears that exchange messages, dropout (so that it draws what it draws
without a graph, from the generators that a checkpoint holds), and every module whose forward
another plugin has replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch._dynamo.utils import counters

if TYPE_CHECKING:
    from . import CompileConfig

_INNER = "_forward_before_compile"
"""Where a module keeps the forward that it had."""


class LayerCompiler:
    """Compiles the layers of one rank with one set of options, and counts what that made."""

    def __init__(self, options: CompileConfig) -> None:
        self._regions = options.regions
        self._before = _counts()
        # One compiled function for all layers, so that they share graphs; its own ones, so that
        # another run in this process neither finds them nor uses up their number.
        self._run = torch.compile(
            _run_inner,
            mode=None if options.mode == "default" else options.mode,
            dynamic={"auto": None, "yes": True, "no": False}[options.dynamic],
            fullgraph=options.fullgraph,
            recompile_limit=options.max_graphs,
            isolate_recompiles=True,
        )

    def compile_layer(self, layer: nn.Module) -> nn.Module:
        """The same module with a compiled forward; its parameters and their names stay."""
        if self._regions == "parts":
            compiled = list(_parts(layer))
        else:
            compiled = [layer]
            for module in _outside(layer):
                _go_through(_run_outside, module)
            if layer.hidden_dropout > 0.0:
                for name in ("self_attn_bda", "mlp_bda"):
                    setattr(layer, name, _dropout_outside(getattr(layer, name)))
        for module in compiled:
            for linear in _local_linears(module):
                linear.forward = MethodType(_matrix_product, linear)
            _go_through(self._run, module)
        return layer

    def readings(self) -> Mapping[str, float]:
        """Graphs made since this run was built, and places where one had to end."""
        now = _counts()
        return {name: float(now[name] - self._before[name]) for name in now}


def _counts() -> dict[str, int]:
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def _is_replaced(module: nn.Module) -> bool:
    """Whether somebody gave this one module a forward of its own."""
    return "forward" in vars(module)


def _parts(layer: nn.Module) -> Iterator[nn.Module]:
    """Norms and the dense feed-forward, where all that is in them can be in a graph."""
    for name in ("input_layernorm", "pre_mlp_layernorm", "mlp"):
        module = getattr(layer, name)
        if not any(map(_stays_outside, module.modules())):
            yield module


def _outside(layer: nn.Module) -> Iterator[nn.Module]:
    """Modules that no graph holds, outermost only."""
    waiting = [layer]
    while waiting:
        module = waiting.pop()
        if module is not layer and _stays_outside(module):
            yield module
        else:
            waiting.extend(module.children())


def _stays_outside(module: nn.Module) -> bool:
    if _is_replaced(module) or hasattr(module, "kernel") or hasattr(module, "router"):
        return True
    return isinstance(module, ColumnParallelLinear | RowParallelLinear) and not _is_local(module)


def _is_local(linear: nn.Module) -> bool:
    return linear.tp_group.size() == 1


def _local_linears(part: nn.Module) -> Iterator[nn.Module]:
    """Linears whose product needs no other rank."""
    for module in part.modules():
        known = type(module) in (ColumnParallelLinear, RowParallelLinear)
        if known and _is_local(module) and not _is_replaced(module):
            yield module


def _matrix_product(
    self: Any, input_: Tensor, weight: Tensor | None = None, *unused: Any, **ignored: Any
) -> tuple[Tensor, Tensor | None]:
    """What Megatron's linear computes where one rank holds all of it.

    Its own forward is an autograd function that handles process groups, which no graph holds.
    """
    weight = self.weight if weight is None else weight
    if self.skip_bias_add:
        return F.linear(input_, weight), self.bias
    return F.linear(input_, weight, self.bias), None


def _go_through(run: Callable[..., Any], module: nn.Module) -> None:
    """Let a module's forward be called by ``run``.

    Bound to one function for all modules, so that the layers are one piece of code to the
    compiler: it compiles the first and knows the others.
    """
    setattr(module, _INNER, module.forward)
    module.forward = MethodType(run, module)


def _dropout_outside(bias_dropout_add: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's bias, dropout and residual addition of a layer, between the graphs."""

    def choose(training: bool, fused: bool) -> Callable[..., Any]:
        @torch.compiler.disable
        def add(*args: Any) -> Any:
            return bias_dropout_add(training, fused)(*args)

        return add

    return choose


def _run_inner(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(self, _INNER)(*args, **kwargs)


@torch.compiler.disable
def _run_outside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(self, _INNER)(*args, **kwargs)
