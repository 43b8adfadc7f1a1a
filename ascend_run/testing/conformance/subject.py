"""The plugin under test, and cached runs on ranks to test it."""

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
from ascend_run.testing.runtime import Examined, PluginFacts, RankOutcome, Runtime, Trial, run_trial

from .check import DoesNotApply

if TYPE_CHECKING:
    from ascend_run.testing.pool import GlooPool

T = TypeVar("T")
TRIAL_SECONDS: Final = 100.0


@attrs.frozen
class Means:
    """Resources that are shared by the checks of several plugins."""

    runtime: Runtime
    pool_of_ranks: Callable[[], GlooPool]
    """Called only when something runs."""
    settings: Mapping[str, object] = attrs.field(factory=dict)
    """Config keys for all trials of the plugin, such as a threshold that tiny models reach."""
    timeout: float = TRIAL_SECONDS
    """Limit of each trial. Unit: seconds."""
    environment: Mapping[str, str] = attrs.field(factory=lambda: dict(os.environ), init=False)
    """The environment before any plugin was imported here."""
    _made: dict[str, list[RankOutcome]] = attrs.field(factory=dict, init=False)
    _examined: dict[str, Examined] = attrs.field(factory=dict, init=False)

    def run(self, trial: Trial, world_size: int) -> list[RankOutcome]:
        """Run a trial and return the results by rank; cached."""
        key = f"{world_size} {trial}"
        if key not in self._made:
            self._made[key] = self.job(run_trial, world_size, trial)
        return self._made[key]

    def job(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Call a function on every rank of the pool and return the results by rank."""
        return self.pool_of_ranks().run(function, world_size, *arguments, timeout=self.timeout)

    def examine(self, trial: Trial, world_size: int) -> Examined:
        """Plan a trial without running it; cached."""
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
        """Why it cannot be loaded; None if it can."""
        try:
            self._facts = self.means.runtime.describe(self.name)
        except AscendRunError as error:
            return "; ".join(error.problems) or error.headline
        return None

    @property
    def facts(self) -> PluginFacts:
        """Data of the plugin.

        Raises:
            DoesNotApply: It cannot be loaded, which another check reports.
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
        """The distribution that installed it."""
        return distribution(self.facts.distribution)

    def instance(self) -> Any:
        """Build a new instance with default options.

        Raises:
            DoesNotApply: The options cannot be built, which another check reports.
        """
        if self.options_class is None:
            return self.plugin()
        try:
            options = self.options_class()
        except Exception as error:
            raise DoesNotApply("its options have no defaults, see KIT-OPTIONS") from error
        return self.plugin(options)

    def once(self, what: str, make: Callable[[], T]) -> T:
        """Return what ``make`` returns, cached under a name, to share it between checks."""
        if what not in self._made:
            self._made[what] = make()
        found: T = self._made[what]
        return found

    @cached_property
    def scratch(self) -> Path:
        """A temporary folder for its trials, removed with this object."""
        folder = tempfile.mkdtemp(prefix="ascend-run-kit-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)
