"""Find the module whose backward is wrong, by gradients of activations and differences of the loss.

A wrong backward makes the gradients of all parameters before it wrong, so they do not name it. The
gradient of an activation is right if every backward behind it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ascend_run.core.checkpoint.regions import unwrapped
from ascend_run.core.train.step import ForwardBackward
from ascend_run.testing.dry_run import DryRun
from ascend_run.testing.gradients.differences import Derivative, direction, slopes
from ascend_run.testing.gradients.loss_terms import MAIN, LossTerms
from ascend_run.types.data import Samples

from .taps import named_modules

_Point = tuple[str, str, int]
"""Module, ``in`` or ``out``, and index of the tensor among those given or returned."""


def module_with_wrong_backward(
    dry_run: DryRun, forward_backward: ForwardBackward, dataset: Samples
) -> str | None:
    """Return the module that computes a wrong gradient from a right one; None if there is none
    whose gradients of activations show it.

    The loss is that of the first micro-batch, on one rank. From the last activation to the first,
    the gradient of each is compared with differences.

    Args:
        dry_run: Built for gradients in float64, with this ``forward_backward``.
        dataset: At least one micro-batch.
    """
    terms = LossTerms(dry_run, forward_backward, [next(dry_run.batches(dataset))])
    points = _Points()
    with torch.compiler.set_stance("force_eager"), ExitStack() as hooks:
        for chunk in dry_run.bundle.chunks:
            model = unwrapped(chunk)
            for name, module in named_modules(model, dry_run.bundle.transformer_config, 0):
                points.hook(name, module, hooks)
        points.records = True
        terms.gradients_of_main()
        points.records = False
        known = False
        for point, x in reversed(points.seen.items()):
            if not _measured(points, point, x, terms).agrees:
                return _maker(point) if known else None
            known = True
    return None


def _maker(point: _Point) -> str:
    """The module that computes a gradient: that of its input itself, that of its output the module
    around it; only the loss is computed outside of modules."""
    module, kind, _ = point
    return module if kind == "in" else module.rpartition(".")[0] or "loss"


def _measured(points: _Points, point: _Point, x: Tensor, terms: LossTerms) -> Derivative:
    gradient = points.gradients.get(point, torch.zeros_like(x)) / terms.num_tokens
    generator = torch.Generator().manual_seed(zlib.crc32(repr(point).encode()))
    along = direction(x, gradient, generator)

    def at(distance: float) -> Sequence[float]:
        points.moves = {point: distance * along}
        return terms.values()[:1]

    try:
        (slope,) = slopes(at, terms.sizes[:1])
    finally:
        points.moves = {}
    return Derivative(
        name=" ".join(map(str, point)),
        of=MAIN,
        gradient=float((gradient * along).sum()),
        slope=slope.value,
        bound=slope.bound,
        is_measured=slope.is_measured,
    )


@attrs.define
class _Points:
    """The activations that modules of one micro-batch take and return, in their first call."""

    records: bool = False
    """Whether this forward and backward is to be recorded."""
    seen: dict[_Point, Tensor] = attrs.field(factory=dict)
    """In the order of execution; those with a gradient."""
    gradients: dict[_Point, Tensor] = attrs.field(factory=dict)
    """Of the sum of the loss over the tokens."""
    moves: dict[_Point, Tensor] = attrs.field(factory=dict)
    """What is added to an activation, in its next forward."""

    def hook(self, name: str, module: nn.Module, hooks: ExitStack) -> None:
        """Add hooks outside of those that a module has, whose backward is then its own."""

        # The output layer's are also called by its model, without arguments.
        def before(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
            return self._passed(name, "in", (args, kwargs))

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return self._passed(name, "out", output)

        hooks.enter_context(
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        )
        hooks.enter_context(module.register_forward_hook(after))

    def _passed(self, name: str, kind: str, given: Any) -> Any:
        if not self.records and not self.moves:
            return given
        leaves, form = tree_flatten(given)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaves[index] = self._point((name, kind, index), leaf)
        return tree_unflatten(leaves, form)

    def _point(self, point: _Point, x: Tensor) -> Tensor:
        if (move := self.moves.pop(point, None)) is not None:
            return x + move.to(x.dtype)
        has_gradient = self.records and x.requires_grad and torch.is_grad_enabled()
        # Kernels read what is noted on a parameter.
        if not has_gradient or point in self.seen or isinstance(x, nn.Parameter):
            return x
        self.seen[point] = x.detach()
        alias = x.view_as(x)  # its gradient is that of this use alone

        def note(gradient: Tensor) -> None:
            self.gradients[point] = gradient.detach().clone()

        register: Any = alias.register_hook
        register(note)
        return alias
