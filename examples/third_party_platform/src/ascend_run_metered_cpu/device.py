"""One rank's device; imports torch."""

from __future__ import annotations

from torch import Tensor

from ascend_run.plugins.platforms.cpu.device import CpuDevice, SynchronousCopier

from .meter import Meter


class MeteredDevice(CpuDevice):
    """The CPU's device, whose copies to the host and back are counted.

    Args:
        local_rank: Position among this machine's ranks.
    """

    name = "metered-cpu"

    def __init__(self, local_rank: int, meter: Meter) -> None:
        super().__init__(local_rank)
        self._meter = meter

    def host_copier(self) -> MeteredCopier:
        return MeteredCopier(self._meter)


class MeteredCopier(SynchronousCopier):
    """Counts the bytes of each copy, as ``to_host_bytes`` and ``to_device_bytes``."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def to_host(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        self._meter.add("to_host_bytes", tensor.nbytes)
        return super().to_host(tensor, out)

    def to_device(self, host: Tensor, out: Tensor) -> None:
        self._meter.add("to_device_bytes", host.nbytes)
        super().to_device(host, out)
