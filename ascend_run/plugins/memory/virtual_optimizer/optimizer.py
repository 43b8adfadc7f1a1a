"""The optimizer; imports torch and Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import attrs
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from ascend_run.plugin_api import Device

from .steps import Step, one_by_one, stepping_by, with_few_operators

if TYPE_CHECKING:
    from ascend_run.ops.memory.host_mapped import HostMapped
    from ascend_run.plugin_api import MixedPrecisionOptimizer


@attrs.define
class Room:
    """What is left of a rank's memory of the host, for all of its optimizers."""

    nbytes: float


def virtual(
    inner: type[MixedPrecisionOptimizer], device: Device, memory: HostMapped, room: Room
) -> type[MixedPrecisionOptimizer]:
    """Return a subclass that keeps its states in memory of the host that the device addresses."""
    return type(
        inner.__name__, (_Virtual, inner), {"device": device, "memory": memory, "room": room}
    )


class _Virtual(MegatronOptimizer):
    """Mixed into Megatron's optimizers.

    The states of ``optimizer.state``, all but those of one value, are in memory of the host as far
    as there is room, in the order in which parameters are updated. They stay there in the step. The
    first step creates the states parameter by parameter, and moves each before the next.
    """

    device: Device
    memory: HostMapped
    room: Room

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mapped: dict[Tensor, dict[str, Tensor]] = {}
        """Parameter that is stepped -> its states that are on the host."""
        self._has_stepped = False
        self._materialized = False

    @torch.no_grad()
    def update(self) -> None:
        """Step; the inner optimizer may replace states."""
        with stepping_by(self.optimizer, self._step()):
            self._inner_class().update()
        if self._has_stepped:
            self._move(self._parameters())
        self._has_stepped = True
        self._rest()

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Hold the states where every operator can read and write them, too. States that are
        created meanwhile are on the device until the end."""
        with self._inner_class().materialized():
            if self._materialized:
                yield
                return
            self._materialized = True
            self._make_readable()
            try:
                yield
            finally:
                self._materialized = False
                with torch.no_grad():
                    self._move(self._parameters())
                self._rest()

    def _step(self) -> Step:
        """Return what is done whenever the inner optimizer is to step."""
        step: Step = self.optimizer.step
        if not self.memory.every_operator:
            step = partial(
                with_few_operators,
                self.optimizer,
                step,
                self.memory,
                lambda parameter: bool(self._mapped.get(parameter)),
            )
        if self._has_stepped:
            return step
        return partial(one_by_one, self.optimizer, step, lambda p: self._move([p]))

    def _make_readable(self) -> None:
        """Replace states by tensors that every operator takes."""
        for parameter, mapped in self._mapped.items():
            states = self.optimizer.state[parameter]
            for name, held in mapped.items():
                if states.get(name) is held:
                    states[name] = self.memory.read(held)

    def _move(self, parameters: Iterable[Tensor]) -> None:
        """Move what is not on the host while there is room, and write back what was read."""
        for parameter in parameters:
            if states := self.optimizer.state.get(parameter):
                self._move_states(states, self._mapped.setdefault(parameter, {}))

    def _move_states(self, states: dict[str, Any], mapped: dict[str, Tensor]) -> None:
        for name, held in [*mapped.items()]:
            if not _are_like(states.get(name), held):
                self.device.synchronize()  # others may get its memory
                self.room.nbytes += mapped.pop(name).nbytes
        for name, values in states.items():
            if name not in mapped:
                if not self._may_move(values) or values.nbytes > self.room.nbytes:
                    continue
                mapped[name] = self.memory.empty(values.shape, values.dtype)
                self.room.nbytes -= values.nbytes
            if values is not mapped[name]:
                self.memory.write(mapped[name], values)
        states |= mapped

    def _may_move(self, values: object) -> TypeGuard[Tensor]:
        """Whether a state is a tensor of the device with more than one value."""
        return (
            isinstance(values, Tensor)
            and values.ndim > 0
            and values.numel() > 0
            and values.device.type == self.device.torch_device.type
        )

    def _rest(self) -> None:
        self.memory.rest(tensor for held in self._mapped.values() for tensor in held.values())

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _inner_class(self) -> MixedPrecisionOptimizer:
        # Another name than in other plugins, whose classes may be below.
        return cast("MixedPrecisionOptimizer", super())


def _are_like(values: object, held: Tensor) -> bool:
    return isinstance(values, Tensor) and (values.shape, values.dtype) == (held.shape, held.dtype)
