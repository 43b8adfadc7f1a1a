"""As the real package, on import: ``torch.npu`` is there."""

import torch

from tests.plugins.npu.stand_in import StandIn

assert StandIn.under_way is not None
StandIn.under_way.replace(torch, "npu", StandIn.under_way.npu)
__version__ = StandIn.under_way.version
