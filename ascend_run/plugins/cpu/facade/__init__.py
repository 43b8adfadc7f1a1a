"""Replacements that let Megatron use the CPU as its accelerator, declared as one table.

Megatron names ``torch.cuda`` and ``device="cuda"`` throughout. Each row of the table replaces one
name for the length of a run and says why; removing the facade puts every original object back.
Nothing here intercepts operations: no TorchFunctionMode, no dispatch key, so a layer's forward
runs at its usual speed. Rows on Megatron's own names and on torch's are in one table, apart from
the patches that a plugin may ask for, because they go together or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .substitution import Substitute, Substitutions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascend_run.plugins.cpu.device import CpuDevice


def facade_table(device: CpuDevice) -> Sequence[Substitute]:
    """Every replacement, in the order in which it is installed."""
    from .cuda import cuda_substitutes
    from .distributed import distributed_substitutes
    from .megatron import megatron_substitutes
    from .random import DeviceRandom, random_substitutes
    from .tensors import tensor_substitutes

    random = DeviceRandom()
    return (
        *cuda_substitutes(device),
        *random_substitutes(random),
        *tensor_substitutes(),
        *distributed_substitutes(),
        *megatron_substitutes(),
    )


class Facade:
    """The table, installed once and removed once."""

    def __init__(self, device: CpuDevice) -> None:
        self._device = device
        self._installed: Substitutions | None = None

    def install(self) -> None:
        """Replace everything, or nothing where a row fails."""
        self._installed = Substitutions(facade_table(self._device))
        self._installed.install()
        _forget_torch_functions()

    def remove(self) -> None:
        """Put every original back, last row first."""
        if self._installed is not None:
            self._installed.remove()
            self._installed = None
            _forget_torch_functions()


def _forget_torch_functions() -> None:
    """Drop torch.compile's map of torch's functions, which holds them by object, not by name."""
    from torch._dynamo import trace_rules

    trace_rules.clear_lru_cache()


__all__ = ["Facade", "Substitute", "Substitutions", "facade_table"]
