"""Select the checkpoint that a run resumes from."""

from __future__ import annotations

import attrs

from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.contracts import CheckpointStore


@attrs.frozen
class CorruptCheckpoint:
    """A corrupt checkpoint that was skipped."""

    step: int
    reason: str


@attrs.frozen
class Choice:
    """The selected checkpoint."""

    step: int | None  #: None if there is no checkpoint, so that the run starts at step 0.
    corrupt: tuple[CorruptCheckpoint, ...] = ()
    """Newer checkpoints that failed the integrity check, newest first; logged as errors."""
    newer: tuple[int, ...] = ()
    """Checkpoints later than an explicitly requested step, valid or not.

    The next automatic resume would select the last of them.
    """


def choose(
    store: CheckpointStore,
    step: int | None = None,
    *,
    max_fallback: int = 2,
    required: bool = False,
) -> Choice:
    """Select the newest valid checkpoint, or the requested one.

    Must be called on all ranks; all return the same one.

    Args:
        step: Select exactly this step.
        max_fallback: How many corrupt newer checkpoints may be skipped.
        required: Whether an empty folder is an error (the user named it to load from).

    Raises:
        CheckpointError: The requested checkpoint is missing or corrupt; there are checkpoints but
            none is valid; too many are corrupt; or there is none and one is required.
    """
    available = store.steps()
    listed = ", ".join(map(str, available)) or "none"
    if step is not None:
        if step not in available:
            raise CheckpointError(f"no checkpoint of step {step}; available: {listed}")
        store.verify(step)
        return Choice(step, newer=tuple(later for later in available if later > step))
    corrupt: list[CorruptCheckpoint] = []
    for candidate in reversed(available):
        try:
            store.verify(candidate)
        except CheckpointError as error:
            corrupt.append(CorruptCheckpoint(candidate, str(error)))
            if len(corrupt) > max_fallback:
                break
            continue
        return Choice(candidate, tuple(corrupt))
    if corrupt:
        raise CheckpointError(
            f"no valid checkpoint within checkpoint.max_fallback={max_fallback} of the newest "
            f"(available: {listed})",
            [
                *(f"step {bad.step}: {bad.reason}" for bad in corrupt),
                "raise checkpoint.max_fallback, name one by checkpoint.step, or use another folder",
            ],
        )
    if required:
        raise CheckpointError("checkpoint.load is set, but there is no checkpoint to load")
    return Choice(None)
