"""Parameters that data parallelism gathers when their module is called."""

from __future__ import annotations

from torch import nn


def await_parameters(module: nn.Module) -> None:
    """Wait for the parameters of a module and of its submodules; the caller reads them without
    calling these modules.

    Megatron's DistributedDataParallel waits in hooks before a module's forward, if it overlaps the
    gathers with forwards.
    """
    for part in module.modules():
        for hook in [*part._forward_pre_hooks.values()]:
            hook(part, ())
