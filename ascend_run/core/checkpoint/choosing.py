"""Which checkpoint a run goes on from."""

from __future__ import annotations

import attrs

from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.contracts import CheckpointStore


@attrs.frozen
class CorruptCheckpoint:
    """One that was passed over."""

    step: int
    reason: str


@attrs.frozen
class Choice:
    """Where a run goes on from."""

    step: int | None
    """None: there is no checkpoint, so the run begins afresh."""
    corrupt: tuple[CorruptCheckpoint, ...] = ()
    """Newer ones that are not sound, newest first; to be told loudly."""
    newer: tuple[int, ...] = ()
    """Sound or not, later than a step that was asked for by number: the next automatic resume would
    take the last of them."""


def choose(
    store: CheckpointStore,
    step: int | None = None,
    *,
    max_fallback: int = 2,
    required: bool = False,
) -> Choice:
    """The newest sound checkpoint, or the one asked for. Called on all ranks; all agree.

    Args:
        step: Exactly this one.
        max_fallback: How many corrupt newer ones may be passed over.
        required: Whether an empty folder is an error (the user named it to load from).

    Raises:
        CheckpointError: The one asked for is missing or corrupt; there are checkpoints but none
            is sound; too many are corrupt; or there is none and one is required.
    """
    there = store.steps()
    listed = ", ".join(map(str, there)) or "none"
    if step is not None:
        if step not in there:
            raise CheckpointError(f"no checkpoint of step {step}; there: {listed}")
        store.verify(step)
        return Choice(step, newer=tuple(later for later in there if later > step))
    corrupt: list[CorruptCheckpoint] = []
    for candidate in reversed(there):
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
            f"no sound checkpoint within checkpoint.max_fallback={max_fallback} of the newest "
            f"(there: {listed})",
            [
                *(f"step {bad.step}: {bad.reason}" for bad in corrupt),
                "raise checkpoint.max_fallback, name one by checkpoint.step, or use another folder",
            ],
        )
    if required:
        raise CheckpointError("there is no checkpoint to load, and one was asked for")
    return Choice(None)
