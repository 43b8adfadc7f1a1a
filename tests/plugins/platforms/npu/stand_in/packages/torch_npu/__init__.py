"""Like the real package, defines ``torch.npu`` on import."""

import torch

from tests.plugins.platforms.npu.stand_in import StandIn

assert StandIn.under_way is not None
StandIn.under_way.replace(torch, "npu", StandIn.under_way.npu)
__version__ = StandIn.under_way.version
