"""The optimizer of a run, as data that ``plan`` and checkpoints read. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import attrs

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

ITEM_BYTES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Dtypes of optimizer states, and the size of an element."""
MAIN_PARAM: Final = "main_param"
"""Name of the master weights beside the states."""


@attrs.frozen(kw_only=True)
class OptimizerState:
    """A tensor that an optimizer keeps for each parameter."""

    dtype: str = attrs.field(default="float32", validator=attrs.validators.in_(ITEM_BYTES))
    """Name of a torch dtype."""
    scalar: bool = False
    """Whether it is one value, equal on all ranks; otherwise it has the parameter's shape."""
    initial: float | Literal["parameter"] = 0.0
    """Value before the first step: a number, or ``parameter``, the parameter's own values. The
    optimizer creates it in its first step, since weights may be loaded after it is built."""
    block: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """If positive, it has one value for each block of this many elements, in their order. A method
    ``expand_states`` of the optimizer then replaces it by states that a checkpoint can hold."""
    where: Mapping[str, Any] = attrs.field(factory=dict)
    """Per-parameter options that a parameter must have to have this state; empty: all have it. See
    :attr:`OptimizerSpec.parameter_options`."""

    def exists_for(self, options: Mapping[str, Any]) -> bool:
        """Return whether parameters with these options have it."""
        return all(options.get(name) == value for name, value in self.where.items())

    def nbytes(self, numel: float, tensors: int) -> float:
        """Return its size for parameters with ``numel`` elements in all."""
        values = math.ceil(numel / self.block) if self.block else numel
        return ITEM_BYTES[self.dtype] * (tensors if self.scalar else values)


def _state_names(instance: object, attribute: attrs.Attribute[Any], states: Any) -> None:
    for name in states:
        if not name.isidentifier() or name == MAIN_PARAM:
            raise ValueError(
                f"{name!r} is not a name for a state: expected an identifier other "
                f"than {MAIN_PARAM!r}"
            )


@attrs.frozen(kw_only=True)
class OptimizerSpec:
    """How to build a run's optimizer, and what it keeps for each parameter."""

    build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    """Build it from parameter groups, like a class of ``torch.optim``.

    Parameters are the float32 tensors that it updates: under mixed precision the master weights,
    with a distributed optimizer this rank's range of each parameter's elements, [elements]. The
    schedule sets ``lr`` and ``weight_decay`` of each group before every step."""
    states: Mapping[str, OptimizerState] = attrs.field(validator=_state_names)
    """Name in ``optimizer.state[parameter]`` -> state. Checkpoints store it by that name."""
    element_wise: bool
    """Whether the update of an element depends only on that element's value, gradient and state,
    and on scalars. Otherwise it is refused where a rank holds only some elements of a parameter."""
    tensor_parallel: bool = False
    """For an optimizer that is not element-wise: whether it supports parameters that are sharded
    over tensor-parallel ranks, with collectives of its own."""
    parameter_options: Callable[[str, bool], Mapping[str, Any]] = lambda *_: {}
    """Return options of one parameter, which become those of its parameter group: parameters with
    different options are in different groups. Values must be hashable.

    Called with the parameter's name (``decoder.layers.0.mlp.linear_fc1.weight``) and whether it is
    a matrix: it has two dimensions or more and is no bias. Imports no torch. ``plan`` calls it too,
    with a name that has the last two words of the module alone, as ``mlp.linear_fc1``."""


@attrs.frozen
class SteppedParameter:
    """A model parameter and the tensor that an optimizer updates for it."""

    parameter: Tensor  #: The model's.
    stepped: Tensor  #: Itself, its master weights or a range of either; the key of its states.
    inner: torch.optim.Optimizer  #: The optimizer that has its states.
    flat_range: tuple[int, int] | None = None
    """Range of the flat parameter that ``stepped`` has with a distributed optimizer, else None."""
    read: Callable[[Tensor], Tensor] | None = None
    """Returns elements of ``stepped`` at flat positions, where it has none between steps."""


class MixedPrecisionOptimizer(Protocol):
    """What the kernel calls of Megatron's optimizers beside their own interface."""

    optimizer: torch.optim.Optimizer  #: The one inside, which ``OptimizerSpec.build`` made.

    def stepped(self) -> Iterator[SteppedParameter]:
        """Yield every parameter that it updates on this rank."""

    def update(self) -> None:
        """Step with ready gradients and update the model weights, without an all-gather."""

    def refresh(self) -> None:
        """Copy the master weights, which are materialized, to the model weights."""

    def materialized(self) -> AbstractContextManager[None]:
        """Hold the master weights in the ``stepped`` tensors, to be read and written."""
