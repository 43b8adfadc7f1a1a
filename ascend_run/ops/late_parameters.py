"""Parameters that data parallelism gathers when their module is called."""

from __future__ import annotations

from typing import Final

from torch import nn

_GATHERING: Final = "megatron.core.distributed."
"""Where the hooks are defined that wait for gathers."""


def await_parameters(module: nn.Module) -> None:
    """Wait for the parameters of a module and of its submodules; the caller reads them without
    calling these modules.

    Megatron's DistributedDataParallel waits in hooks before a module's forward, if it overlaps the
    gathers with forwards. Hooks of others, which may count calls, are not called.
    """
    for part in module.modules():
        for hook in [*part._forward_pre_hooks.values()]:
            if getattr(hook, "__module__", "").startswith(_GATHERING):
                hook(part, ())
