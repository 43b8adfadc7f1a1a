"""What is asked, and one of the runs that answer it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.core.config.raw import COMMAND_LINE, Given, RawConfig
from ascend_run.core.config.reading import read_raw
from ascend_run.core.verify.thresholds import STEPS
from ascend_run.entrypoints.planning import Prepared, prepare_raw

from . import layouts

ORIGIN: Final = "verify"


@attrs.frozen(kw_only=True)
class Question:
    """Plugins, a layout, a model, and what to compare them with."""

    enable: tuple[str, ...] = ()
    """Features under test. None tests the layout."""
    beside: tuple[str, ...] = ()
    """Features that are enabled in the reference of the same layout as well."""
    layout: Mapping[str, int] | None = None
    """As ``layouts.parse_layout`` answers; None is the file's, or one rank."""
    against: Mapping[str, int] | None = None
    """One more layout to compare with, without the plugins."""
    model: str | None = None
    """Of ``testing.models.MODELS``, where no file is given; None chooses."""
    file: str | None = None
    overrides: tuple[str, ...] = ()
    """``section.key=value``; those of a plugin count where it is enabled."""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """The same as values."""
    platform: str | None = None
    task: str | None = None
    steps: int = STEPS


@attrs.frozen(kw_only=True)
class Side:
    """One run: JSON can hold all of it, so that ranks can be told."""

    name: str
    """In words."""
    world_size: int
    enable: tuple[str, ...]
    values: Mapping[str, Any]
    """Config keys that count over everything else."""
    base: Mapping[str, Any]
    """Config keys that everything else counts over: a built-in model."""
    file: str | None
    overrides: tuple[str, ...]
    platform: str | None
    task: str | None
    steps: int

    @property
    def uses_kit_batches(self) -> bool:
        return self.file is None

    def as_request(self) -> dict[str, Any]:
        return attrs.asdict(self)

    @classmethod
    def of_request(cls, request: Mapping[str, Any]) -> Side:
        data = {name: request[name] for name in attrs.fields_dict(cls)}
        return cls(
            **{**data, "enable": tuple(data["enable"]), "overrides": tuple(data["overrides"])}
        )

    def prepare(self) -> Prepared:
        """
        Raises:
            AscendRunError: This run cannot be made.
        """
        file = None if self.file is None else Path(self.file)
        asked = read_raw(file, [word for word in self.overrides if self._counts(word)])
        base = {key: Given(value, ORIGIN) for key, value in self.base.items()}
        kept = {key: given for key, given in asked.values.items() if self._counts(key)}
        values = {
            key: Given(value, ORIGIN) for key, value in self.values.items() if self._counts(key)
        }
        raw = RawConfig(values={**base, **kept, **values}, problems=asked.problems)
        raw = raw.replacing(
            COMMAND_LINE, enable=[*self.enable], platform=self.platform, task=self.task
        )
        return prepare_raw(raw, self.world_size)

    def _counts(self, key: str) -> bool:
        """Whether a setting goes with this run's plugins and its layout, which are not those of the
        file; it would be refused."""
        key = key.partition("=")[0].strip()
        words = key.split(".")
        if words[0] == "plugins" and len(words) > 1:
            return words[1] in self.enable
        if key in layouts.KEYS.values():
            return key in self.values
        return self.values[layouts.KEYS["pp"]] > 1 or key not in layouts.OF_STAGES
