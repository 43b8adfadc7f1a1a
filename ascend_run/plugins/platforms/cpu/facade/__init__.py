"""Patches that let Megatron use the CPU as its accelerator, declared as one table.

Megatron names ``torch.cuda`` and ``device="cuda"`` throughout. Each row of the table replaces one
name for the length of a run and states why; core checks, applies and undoes them with the patches
of every other plugin, and counts them separately. Nothing here intercepts operations: no
TorchFunctionMode, no dispatch key, so a layer's forward runs at its usual speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascend_run.plugin_api import Patch
    from ascend_run.plugins.platforms.cpu.memory import HostMemory


def facade_patches(memory: HostMemory) -> Sequence[Patch]:
    """Return every row, in the order of application; the rows for randomness share one generator.

    Args:
        memory: Backs the memory functions of ``torch.cuda``.
    """
    from .cuda import cuda_rows
    from .distributed import distributed_rows
    from .megatron import megatron_rows
    from .random import DeviceRandom, random_rows
    from .tensors import tensor_rows

    return (
        *cuda_rows(memory),
        *random_rows(DeviceRandom()),
        *tensor_rows(),
        *distributed_rows(),
        *megatron_rows(),
    )
