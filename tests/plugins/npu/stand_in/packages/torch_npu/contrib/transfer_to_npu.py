"""As the real module, on import: ``torch.cuda`` means the NPU."""

from tests.plugins.npu.stand_in import StandIn

assert StandIn.under_way is not None
StandIn.under_way.transfer()
