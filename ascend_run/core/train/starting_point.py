"""Select the checkpoint a run starts from: its own newest, another run's, a given step, or none.

A supervisor restarts a run with its original command. Checkpoints that the run has saved since then
take precedence over the starting point named in that command.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import attrs

from ascend_run.core.checkpoint import Choice, choose
from ascend_run.core.checkpoint.entries import PROGRESS, SavedProgress
from ascend_run.core.checkpoint.selection import CorruptCheckpoint
from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.contracts import CheckpointStore
from ascend_run.types.config import CheckpointSection


@attrs.frozen(kw_only=True)
class StartingPoint:
    """The starting point of a run."""

    store: CheckpointStore
    folder: str
    choice: Choice
    overridden: str | None = None
    """The setting that is ignored because the run has its own later checkpoints."""
    continues: bool = True
    """True if the run continues its own history; False if it starts a branch."""
    went_back_to: int | None = None
    """For a branch: the step of the run's own folder that it restarts from."""


def find_starting_point(
    options: CheckpointSection,
    own: CheckpointStore,
    own_folder: str,
    open_store: Callable[[str], CheckpointStore],
) -> StartingPoint:
    """Select the starting point. Must be called on all ranks; all return the same one.

    Args:
        own: Store that the run saves to, in ``own_folder``.
        open_store: Opens the store of a folder.

    Raises:
        CheckpointError: The requested checkpoint is missing or corrupt, or no checkpoint is valid.
    """
    load, step, limit = options.load, options.step, options.max_fallback
    elsewhere = load is not None and os.path.abspath(load) != os.path.abspath(own_folder)
    if not options.resume and load is None and step is None:
        return StartingPoint(store=own, folder=own_folder, choice=Choice(None))
    newest_own = Choice(None)
    if options.resume and elsewhere:
        newest_own = choose(own, max_fallback=limit)
    elif options.resume and step is not None:
        newest_own = _newest_since(own, step)
    if newest_own.step is not None:
        passed_over = f"checkpoint.load={load}" if elsewhere else f"checkpoint.step={step}"
        return StartingPoint(
            store=own, folder=own_folder, choice=newest_own, overridden=passed_over
        )
    store, folder = (open_store(str(load)), str(load)) if elsewhere else (own, own_folder)
    choice = choose(store, step, max_fallback=limit, required=load is not None)
    return StartingPoint(
        store=store,
        folder=folder,
        choice=attrs.evolve(choice, corrupt=(*newest_own.corrupt, *choice.corrupt)),
        continues=not elsewhere and step is None,
        went_back_to=None if elsewhere else step,
    )


def _newest_since(own: CheckpointStore, step: int) -> Choice:
    """Return the newest checkpoint saved since the run was set back to ``step``.

    Checkpoints with higher step numbers may be older and belong to the abandoned history.
    """
    corrupt: list[CorruptCheckpoint] = []
    newer: list[int] = []
    for candidate in reversed([saved for saved in own.steps() if saved > step]):
        try:
            values = own.load(candidate, [], ignore_unused=("*",))
        except CheckpointError as error:
            corrupt.append(CorruptCheckpoint(candidate, str(error)))
            continue
        if SavedProgress.read(values[PROGRESS]).went_back_to == step:
            return Choice(candidate, tuple(corrupt), tuple(reversed(newer)))
        newer.append(candidate)
    return Choice(None, tuple(corrupt))
