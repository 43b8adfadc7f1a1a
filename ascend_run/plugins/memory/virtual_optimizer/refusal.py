"""Which optimizers may have states on the host; imports torch."""

from __future__ import annotations

import torch

from ascend_run.plugin_api import PlatformError


def refuse_other_optimizers(optimizer: object) -> None:
    """Check that the operators of the update take states on the host.

    Raises:
        PlatformError: They are not known to, on this platform.
    """
    for part in getattr(optimizer, "chained_optimizers", ()):
        if not (part.memory.every_operator or type(part.optimizer) is torch.optim.AdamW):
            raise PlatformError(
                f"virtual-optimizer: on platform {part.device.name} only the built-in AdamW is "
                f"known to address memory of the host, not {type(part.optimizer).__name__}; use "
                "swap-optimizer"
            )
