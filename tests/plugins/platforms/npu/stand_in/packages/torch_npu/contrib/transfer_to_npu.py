"""Like the real module, redirects ``torch.cuda`` to the NPU on import."""

from tests.plugins.platforms.npu.stand_in import StandIn

assert StandIn.under_way is not None
StandIn.under_way.transfer()
