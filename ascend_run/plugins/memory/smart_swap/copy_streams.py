"""The copies between a device and its host."""

from __future__ import annotations

from ascend_run.ops.transfer.link_speed import measured_link
from ascend_run.ops.transfer.swap_plan import Link
from ascend_run.plugin_api import Device


class CopyStreams:
    """The copies of a device, a stream for each direction.

    Two, since the copies back of one stream wait for those of it that leave.
    """

    def __init__(self, device: Device) -> None:
        self.device = device.torch_device
        self.to_host, self.to_device = device.host_copier(), device.host_copier()
        self._synchronize = device.synchronize

    def measured(self) -> Link:
        """Return the speed of the link, while nothing else uses it."""
        return measured_link(self.to_host, self.to_device, self.device, self._synchronize)
