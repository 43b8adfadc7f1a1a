"""Which checkpoint a run begins at: its own newest, another run's, one of a given step, or none.

A run is started again by whoever keeps it alive, with the very command that it was first given.
What it has saved itself since then counts over where that command says to begin.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import attrs

from ascend_run.core.checkpoint import Choice, choose
from ascend_run.core.checkpoint.choosing import CorruptCheckpoint
from ascend_run.plugin_api import CheckpointError
from ascend_run.plugin_api.config import CheckpointSection
from ascend_run.plugin_api.contracts import CheckpointStore


@attrs.frozen(kw_only=True)
class Beginning:
    """Where a run begins."""

    store: CheckpointStore
    folder: str
    choice: Choice
    instead_of: str | None = None
    """The setting that was passed over, since the run has gone on from it already."""
    goes_on: bool = True
    """This is the run's own history, not a new turn in it."""
    went_back_to: int | None = None
    """A new turn's: the step of the run's own folder that it goes back to."""


def find_beginning(
    options: CheckpointSection,
    own: CheckpointStore,
    own_folder: str,
    open_store: Callable[[str], CheckpointStore],
) -> Beginning:
    """Called on all ranks; all agree.

    Args:
        own: What the run saves to, in ``own_folder``.
        open_store: From a folder to its store.

    Raises:
        CheckpointError: The one asked for is missing or corrupt, or none is sound.
    """
    load, step, limit = options.load, options.step, options.max_fallback
    elsewhere = load is not None and os.path.abspath(load) != os.path.abspath(own_folder)
    if not options.resume and load is None and step is None:
        return Beginning(store=own, folder=own_folder, choice=Choice(None))
    since = Choice(None)
    if options.resume and elsewhere:
        since = choose(own, max_fallback=limit)
    elif options.resume and step is not None:
        since = _since_going_back(own, step)
    if since.step is not None:
        passed_over = f"checkpoint.load={load}" if elsewhere else f"checkpoint.step={step}"
        return Beginning(store=own, folder=own_folder, choice=since, instead_of=passed_over)
    store, folder = (open_store(str(load)), str(load)) if elsewhere else (own, own_folder)
    choice = choose(store, step, max_fallback=limit, required=load is not None)
    return Beginning(
        store=store,
        folder=folder,
        choice=attrs.evolve(choice, corrupt=(*since.corrupt, *choice.corrupt)),
        goes_on=not elsewhere and step is None,
        went_back_to=None if elsewhere else step,
    )


def _since_going_back(own: CheckpointStore, step: int) -> Choice:
    """The newest checkpoint of the run that went back to ``step``; later ones may be older."""
    corrupt: list[CorruptCheckpoint] = []
    newer: list[int] = []
    for candidate in reversed([saved for saved in own.steps() if saved > step]):
        try:
            values = own.load(candidate, [], ignore_unused=("*",))
        except CheckpointError as error:
            corrupt.append(CorruptCheckpoint(candidate, str(error)))
            continue
        if values["progress"].get("went_back_to") == step:
            return Choice(candidate, tuple(corrupt), tuple(reversed(newer)))
        newer.append(candidate)
    return Choice(None, tuple(corrupt))
