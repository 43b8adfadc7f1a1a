"""The plugin under test, and the means to try it: runs on ranks, each made once."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.plugin_api.manifest import Manifest
from ascend_run.plugin_api.testing.runtime import (
    Examined,
    PluginFacts,
    RankOutcome,
    Runtime,
    Trial,
    run_trial,
)

from .check import DoesNotApply

if TYPE_CHECKING:
    from ascend_run.plugin_api.testing.pool import GlooPool

T = TypeVar("T")
TRIAL_SECONDS: Final = 100.0


@attrs.frozen
class Means:
    """What checks of several plugins share."""

    runtime: Runtime
    pool_of_ranks: Callable[[], GlooPool]
    """Asked only when something runs."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """Config keys for every trial of the plugin, such as a bound that tiny models reach."""
    environment: Mapping[str, str] = attrs.field(factory=lambda: dict(os.environ), init=False)
    """As it was before any plugin was imported here."""
    _made: dict[str, list[RankOutcome]] = attrs.field(factory=dict, init=False)
    _examined: dict[str, Examined] = attrs.field(factory=dict, init=False)

    def run(self, trial: Trial, world_size: int) -> list[RankOutcome]:
        """By rank; the same trial is made once."""
        key = f"{world_size} {trial}"
        if key not in self._made:
            self._made[key] = self.job(run_trial, world_size, trial)
        return self._made[key]

    def job(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """A function's answer on each of so many ranks."""
        return self.pool_of_ranks().run(function, world_size, *arguments, timeout=TRIAL_SECONDS)

    def examine(self, trial: Trial, world_size: int) -> Examined:
        """What planning says of a trial."""
        key = f"{world_size} {trial}"
        if key not in self._examined:
            self._examined[key] = self.runtime.examine(trial, world_size)
        return self._examined[key]


class Subject:
    """One plugin.

    Args:
        name: Any of its names.
    """

    def __init__(self, name: str, means: Means) -> None:
        self.name, self.means = name, means
        self._made: dict[str, Any] = {}

    @cached_property
    def load_error(self) -> str | None:
        """Why it cannot be had; None where it can."""
        try:
            self._facts = self.means.runtime.describe(self.name)
        except AscendRunError as error:
            return "; ".join(error.problems) or error.headline
        return None

    @property
    def facts(self) -> PluginFacts:
        """What is known of it.

        Raises:
            DoesNotApply: It cannot be had, which is a check of its own.
        """
        if self.load_error is not None:
            raise DoesNotApply("it cannot be loaded, see KIT-LOAD")
        return self._facts

    @property
    def plugin(self) -> type[Any]:
        return self.facts.plugin

    @property
    def manifest(self) -> Manifest:
        return self.facts.manifest

    @property
    def options_class(self) -> type[Any] | None:
        found: type[Any] | None = getattr(self.plugin, "config_class", None)
        return found

    @property
    def distribution(self) -> Distribution:
        """What installed it."""
        return distribution(self.facts.distribution)

    def instance(self) -> Any:
        """A new one, with its options' defaults.

        Raises:
            DoesNotApply: The options cannot be built, which is a check of its own.
        """
        if self.options_class is None:
            return self.plugin()
        try:
            options = self.options_class()
        except Exception as error:
            raise DoesNotApply("its options have no defaults, see KIT-OPTIONS") from error
        return self.plugin(options)

    def once(self, what: str, make: Callable[[], T]) -> T:
        """What ``make`` answers, asked once, for checks that look at one thing."""
        if what not in self._made:
            self._made[what] = make()
        found: T = self._made[what]
        return found

    @cached_property
    def scratch(self) -> Path:
        """A folder for its trials, removed with this object."""
        folder = tempfile.mkdtemp(prefix="ascend-run-kit-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)
