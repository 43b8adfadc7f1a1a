"""Settings under which the built-in models exercise a plugin, as manifests declare them.
Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.plugin_api import Manifest
from ascend_run.plugin_api.implementations import implementations
from ascend_run.prepare.config.reading import read_raw
from ascend_run.registry.discovery import discover
from ascend_run.testing.small_settings import settings_of

from .questions import Question

_OF_CHECKPOINTS: Final = {
    "ascend_checkpoint_transfer",
    "ascend_checkpoint_entries",
    "ascend_checkpoint_filter",
    "ascend_after_checkpoint",
}


def manifests_of(names: Sequence[str]) -> dict[str, Manifest]:
    """Return name -> manifest; plugins that cannot be loaded are left out, since planning the run
    reports them."""
    return {name: plugin.manifest for name, plugin in _classes(names).items()}


def saves(name: str) -> bool:
    """Return whether a plugin has hooks that act only if a checkpoint is saved."""
    return any(_OF_CHECKPOINTS & implementations(p).keys() for p in _classes([name]).values())


def _classes(names: Sequence[str]) -> Mapping[str, Any]:
    classes: Mapping[str, Any] = discover().load_each(names).classes
    return {name: classes[name] for name in names if name in classes}


@attrs.frozen
class SmallSettings:
    """The ``small_model_settings`` of one plugin in a run, as ``key=value``."""

    chosen: tuple[str, ...] = ()
    """Set by ``verify``."""
    not_set: tuple[str, ...] = ()
    """Set to another value by the user."""


def small_settings(question: Question, manifest: Manifest) -> SmallSettings:
    """Return the settings of a plugin under test."""
    file = None if question.file is None else Path(question.file)
    read = read_raw(file, question.overrides).values
    given = {**{key: raw.value for key, raw in read.items()}, **question.config}
    wanted = settings_of(manifest, of_model=question.file is None)
    return SmallSettings(
        tuple(f"{key}={value}" for key, value in wanted.items() if key not in given),
        tuple(f"{key}={value}" for key, value in wanted.items() if given.get(key, value) != value),
    )
