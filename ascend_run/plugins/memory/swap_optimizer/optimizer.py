"""The optimizer; imports torch and Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from ascend_run.ops.optimizer_buckets import buckets, stepping_some, updated_elements
from ascend_run.plugin_api import Device, HostCopier
from ascend_run.types.optimizer import MAIN_PARAM

if TYPE_CHECKING:
    from ascend_run.plugin_api import MixedPrecisionOptimizer, SteppedParameter


def swapping(
    inner: type[MixedPrecisionOptimizer],
    device: Device,
    copier: HostCopier,
    overlaps: bool,
    bucket_size: int,
) -> type[MixedPrecisionOptimizer]:
    """Return a subclass that keeps its states and master weights on the host.

    Args:
        copier: Of the device, or to files.
        overlaps: Whether the next bucket arrives and the one before leaves while one is updated;
            otherwise copies must be complete when the copier's calls return.
        bucket_size: See ``SwapOptimizerConfig``.
    """
    attributes = {
        "device": device,
        "copier": copier,
        "overlaps": overlaps,
        "bucket_size": bucket_size,
    }
    return type(inner.__name__, (_Swapping, inner), attributes)


class _Swapping(MegatronOptimizer):
    """Mixed into Megatron's optimizers.

    Between steps the states of ``optimizer.state`` are on the host, all but those of one value, and
    the tensor of a master weight has its shape and no memory: it is one NaN, expanded. A step
    fetches, updates and sends them bucket by bucket.
    """

    device: Device
    copier: HostCopier
    overlaps: bool
    bucket_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_host: dict[Tensor, dict[str, Tensor]] = {}
        """Parameter that is stepped -> the states and the master weights that it has there."""
        self._weights = {
            item.stepped: updated_elements(item)
            for item in self._inherited().stepped()
            if item.stepped.dtype != item.parameter.dtype and item.stepped.numel()
        }
        """Master weights -> the elements of the model's weight."""
        self._blank = torch.full((), torch.nan, device=self.device.torch_device)
        self._materialized = False
        self._copying = False
        """Whether copies to the host may be in progress."""
        self._send(self._weights)

    def stepped(self) -> Iterator[SteppedParameter]:
        """Yield every parameter that it updates on this rank; its states may then be read."""
        self._finish_copies()
        for item in self._inherited().stepped():
            if item.stepped in self._weights:
                yield attrs.evolve(item, read=partial(self._read, item.stepped))
            else:
                yield item

    @torch.no_grad()
    def update(self) -> None:
        """Step bucket by bucket; each is a call of the inner optimizer with parts of its groups."""
        parameters = self._parameters()
        ranges = buckets([p.numel() for p in parameters], self.bucket_size)
        parts = ([parameters[at] for at in one] for one in ranges)
        leaving: list[Tensor] = []
        with stepping_some(self.optimizer) as step:
            for updated, arriving in _stages(parts, overlaps=self.overlaps):
                self.copier.wait_device()
                self._fetch(arriving)
                if updated:
                    step(updated)
                self._refresh(updated)
                self.copier.wait_host()
                leaving = self._start_to_send(updated)
                if not self.overlaps:
                    leaving.clear()
        self.copier.wait_host()
        del leaving

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master weights, which are materialized, to the model weights."""
        self._refresh(self._weights)

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Set the master weights to the model weights."""
        assert state_dict is None
        self._finish_copies()
        for main, weight in self._weights.items():
            host = self._on_host[main][MAIN_PARAM]
            self._copy(weight.to(host.dtype).view(host.shape), host)
            self.copier.wait_host()

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Hold the master weights in their tensors, to be read and written: on the host, or on the
        device while there are parameters without states, which are then created there."""
        if self._materialized:
            yield
            return
        self._finish_copies()
        parameters = self._parameters()
        with torch.no_grad():
            if all(self.optimizer.state.get(p) for p in parameters):
                for main in self._weights:
                    main.data = self._on_host[main][MAIN_PARAM]
            else:
                self._fetch(self._weights)
                self.copier.wait_device()
        self._materialized = True
        try:
            yield
        finally:
            self._materialized = False
            with torch.no_grad():
                self._send(parameters)

    def _fetch(self, parameters: Iterable[Tensor]) -> None:
        """Start to copy all that is on the host of some parameters to the device."""
        for parameter in parameters:
            for name, host in self._on_host.get(parameter, {}).items():
                values = torch.empty_like(host, device=self.device.torch_device)
                self.copier.to_device(host, values)
                self._put(parameter, name, values)

    def _send(self, parameters: Iterable[Tensor]) -> None:
        """Copy all of some parameters that is not on the host."""
        leaving = self._start_to_send(parameters)
        self.copier.wait_host()
        del leaving

    def _start_to_send(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Start the copies; return the tensors that must not be freed before they are complete."""
        leaving = []
        for parameter in parameters:
            before = self._on_host.get(parameter, {})
            after = self._on_host[parameter] = {}
            for name, values in self._values(parameter):
                host = before.get(name)
                if host is None or host.data_ptr() != values.data_ptr():
                    leaving.append(values)
                    host = self._copy(values, host)
                after[name] = host
                is_main = name == MAIN_PARAM
                self._put(parameter, name, self._blank.expand(host.shape) if is_main else host)
        self._copying = True
        return leaving

    def _copy(self, values: Tensor, host: Tensor | None) -> Tensor:
        """Start a copy to the host, into what was there if that has the shape."""
        if host is not None and (host.shape, host.dtype) != (values.shape, values.dtype):
            host = None
        return self.copier.to_host(values, host)

    def _values(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the states of a parameter that have its shape, and the master weights."""
        for name, value in [*self.optimizer.state.get(parameter, {}).items()]:
            if isinstance(value, Tensor) and value.ndim and value.numel():
                yield name, value
        if parameter in self._weights:
            yield MAIN_PARAM, parameter.detach()

    def _put(self, parameter: Tensor, name: str, values: Tensor) -> None:
        if name == MAIN_PARAM:
            parameter.data = values
        else:
            self.optimizer.state[parameter][name] = values

    def _refresh(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if (weight := self._weights.get(parameter)) is not None:
                weight.copy_(parameter.detach().view(-1))

    def _read(self, main: Tensor, where: Tensor) -> Tensor:
        self._finish_copies()
        values = main.detach() if self._materialized else self._on_host[main][MAIN_PARAM]
        return values.view(-1).index_select(0, where.to(values.device)).to(where.device)

    def _finish_copies(self) -> None:
        if self._copying:
            self.device.synchronize()
            self._copying = False

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _inherited(self) -> MixedPrecisionOptimizer:
        return cast("MixedPrecisionOptimizer", super())


def _stages(
    buckets: Iterable[Sequence[Tensor]], *, overlaps: bool
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Yield the bucket that is updated, and the one whose copies to the device start before that:
    the next one or, if copies are not overlapped, itself. With overlap nothing is updated while the
    first one arrives, and nothing arrives while the last one is updated.
    """
    updated: Sequence[Tensor] = ()
    for arriving in buckets:
        yield updated if overlaps else arriving, arriving
        updated = arriving
    if overlaps:
        yield updated, ()
