"""Fingerprint every step: a 64-bit hash of loss, gradient norm and sampled parameters.

A step only queues copies of the sampled elements, without a device synchronization. Several steps
are hashed and reduced over all ranks at once, when logging synchronizes the device anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ascend_run.core.fingerprint.reading import RowHashes
from ascend_run.core.fingerprint.sampling import Samples, bits_of, samples_of
from ascend_run.ops.hashing import MASK, Words, combine, float_bits, hash_elements
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.errors import CheckpointError

from .optimizer_kinds import any_rank
from .step import StepResult

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MOST_WAITING: Final = 64
"""Maximum number of steps whose samples are buffered in device memory."""


@attrs.frozen(kw_only=True)
class _Waiting:
    """A step that is not hashed yet."""

    step: int
    consumed_samples: int
    loss: float | None
    grad_norm: float | None
    batch: int | None
    """Hash of this rank's part of the batch."""
    values: Sequence[Tensor]
    """Sampled elements, one tensor per group of samples."""


class StepFingerprints:
    """Collect the fingerprints of a run's steps.

    Every method must be called on all ranks, at the same steps.

    Args:
        rows: Hashes of the rows that the steps read; None leaves them out.
    """

    def __init__(
        self,
        context: c.RunContext,
        bundle: c.ModelBundle,
        log: FilteringBoundLogger,
        rows: RowHashes | None = None,
    ) -> None:
        self.context, self._rows = context, rows
        self.latest: str | None = None
        """Fingerprint of the last hashed step, in hex."""
        self._samples, problem = _samples(context, bundle)
        self._has_parameters = not any_rank(problem is not None)
        if problem is not None:
            log.warning("fingerprint.without_parameters", reason=problem)
        self._waiting: list[_Waiting] = []

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full, so that :meth:`take` must be called before the next step."""
        return len(self._waiting) >= MOST_WAITING

    @torch.no_grad()
    def add(self, result: StepResult | None) -> None:
        """Buffer the result of a step; None stands for the initial state."""
        batch = None if result is None or self._rows is None else self._rows.take()
        self._waiting.append(
            _Waiting(
                step=self.context.step,
                consumed_samples=self.context.consumed_samples,
                loss=None if result is None else result.loss,
                grad_norm=None if result is None else result.grad_norm,
                batch=batch,
                values=[group.read() for group in self._samples] if self._has_parameters else [],
            )
        )

    def take(self) -> list[Mapping[str, object]]:
        """Return the entries of the steps since the last call, with equal hashes on every rank."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return []
        entries: list[Mapping[str, Any]] = []
        table = self._over_ranks(waiting)
        for step, (loss, norm, parameters, batch) in zip(waiting, table, strict=True):
            known = parameters if self._has_parameters else None
            self.latest = f"{combine(loss, norm, known):016x}"
            entries.append(
                {
                    "step": step.step,
                    "fingerprint": self.latest,
                    "loss": step.loss,
                    "grad_norm": step.grad_norm,
                    "parameters": None if known is None else f"{known:016x}",
                    "consumed_samples": step.consumed_samples,
                    "batch": None if step.batch is None else f"{batch:016x}",
                }
            )
        return entries

    def _over_ranks(self, waiting: Sequence[_Waiting]) -> list[list[int]]:
        """Reduce over all ranks.

        Returns:
            For each step the bits of rank 0's loss and norm, and the sums of all ranks' hashes of
            parameters and rows.
        """
        words = np.zeros((len(waiting), 4), dtype=np.uint64)
        if self.context.layout.rank == 0:
            words[:, 0] = [float_bits(step.loss) for step in waiting]
            words[:, 1] = [float_bits(step.grad_norm) for step in waiting]
        words[:, 2] = self._hashes(waiting)
        words[:, 3] = [step.batch or 0 for step in waiting]
        # Signed sums wrap around exactly as unsigned ones do.
        table = torch.from_numpy(words.view(np.int64)).to(self.context.device.torch_device)
        dist.all_reduce(table)
        return [[word & MASK for word in row] for row in table.tolist()]

    def _hashes(self, waiting: Sequence[_Waiting]) -> Words:
        """Return the sum of the hashes of this rank's samples. Shape: ``[steps]``."""
        total = np.zeros(len(waiting), dtype=np.uint64)
        if self._has_parameters:
            for index, group in enumerate(self._samples):
                bits = bits_of(torch.stack([step.values[index] for step in waiting]))
                total += hash_elements(bits, group.salt)
        return total


def _samples(context: c.RunContext, bundle: c.ModelBundle) -> tuple[list[Samples], str | None]:
    """Return this rank's samples, or the reason why there are none.

    A model that cannot be checkpointed, and so not sampled, can still be trained.
    """
    try:
        return samples_of(bundle, vocab_size=context.config.model.vocab_size), None
    except CheckpointError as error:
        return [], str(error)
