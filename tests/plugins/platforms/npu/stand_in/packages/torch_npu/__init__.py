"""Like the real package, defines ``torch.npu`` on import."""

from types import SimpleNamespace

import torch

from tests.plugins.platforms.npu.stand_in import StandIn

assert StandIn.under_way is not None
StandIn.under_way.replace(torch, "npu", StandIn.under_way.npu)


class _HcclOptions:
    """Has the fields of ``ProcessGroupHCCL.Options`` that are set here, and no other."""

    __slots__ = ("hccl_config",)


_C = SimpleNamespace(
    _distributed_c10d=SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=_HcclOptions))
)
__version__ = StandIn.under_way.version
