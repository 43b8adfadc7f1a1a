"""Hash what the ranks read in a step to 64 bits: the rows and their positions in the batch.

Each row is hashed with its position in the global batch, and the hashes are summed, so the sum does
not depend on how rows are assigned to ranks and micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ascend_run.core.data.batches import BatchPlan
from ascend_run.ops.hashing import MASK
from ascend_run.plugin_api import Batch


class RowHashes:
    """Hash a rank's micro-batches before they reach the model.

    Args:
        owns: Whether this rank's rows count; set it on one of the ranks that read the same rows.
    """

    def __init__(self, plan: BatchPlan, *, owns: bool) -> None:
        self._plan, self._owns = plan, owns
        self._total = self._micro_batch = 0

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same micro-batches and hash them."""
        for batch in batches:
            if self._owns:
                self._add(batch)
            self._micro_batch += 1
            yield batch

    def take(self) -> int:
        """Return the sum of the rows since the last call, modulo 2^64, and start the next step."""
        total = self._total
        self._total = self._micro_batch = 0
        return total

    def _add(self, batch: Batch) -> None:
        place = self._plan.samples(0, self._micro_batch).start
        hashes: dict[int, hashlib.blake2b] = {}
        for name, tensor in sorted(batch.tensors.items()):
            for row, values in enumerate(tensor.unbind() if tensor.dim() else [tensor]):
                if row not in hashes:
                    hashes[row] = hashlib.blake2b(f"{place + row}".encode(), digest_size=8)
                hashes[row].update(name.encode())
                hashes[row].update(_bytes(values))
        rows = (int.from_bytes(found.digest(), "little") for found in hashes.values())
        self._total = (self._total + sum(rows)) & MASK


def _bytes(values: Tensor) -> memoryview:
    """Return the bytes of a tensor, copied to the host if needed."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
