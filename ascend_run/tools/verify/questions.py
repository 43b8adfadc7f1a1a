"""What to verify, and one of the runs that are compared for it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from ascend_run.prepare.config.raw import COMMAND_LINE, RawConfig, RawValue
from ascend_run.prepare.config.reading import read_raw
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.tools.verify.compare.thresholds import STEPS

from . import layouts
from .stand_in import StandIn

if TYPE_CHECKING:
    from ascend_run.core.run import RunRequest

ORIGIN: Final = "verify"
KIT_DATASET: Final = "the-kit"
"""``data.train`` of a built-in model."""


@attrs.frozen(kw_only=True)
class Question:
    """What to verify: plugins, layout and model, and what to compare them with."""

    enable: tuple[str, ...] = ()
    """Features to verify; if empty, the layout is verified."""
    beside: tuple[str, ...] = ()
    """Features that are also enabled in the reference run of the same layout."""
    layout: Mapping[str, int] | None = None
    """As returned by ``layouts.parse_layout``; None: the file's, or one rank."""
    against: Mapping[str, int] | None = None
    """Another layout to compare with, without the plugins."""
    model: str | None = None
    """Key of ``testing.models.MODELS``, used if ``file`` is None; None: chosen automatically."""
    file: str | None = None
    """Config file."""
    overrides: tuple[str, ...] = ()
    """``section.key=value``; options of a plugin apply to runs that enable it."""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """Config key -> value; like ``overrides``."""
    platform: str | None = None
    task: str | None = None
    steps: int = STEPS
    resume: bool = False
    """Also stop and resume a run, and compare it with one without a stop."""


@attrs.frozen(kw_only=True)
class Side:
    """One of the runs that are compared. Serializable as JSON, to send it to the ranks."""

    name: str
    """Description for messages."""
    world_size: int
    enable: tuple[str, ...]
    values: Mapping[str, Any]
    """Config values with the highest precedence."""
    base: Mapping[str, object]
    """Config values with the lowest precedence: a built-in model."""
    file: str | None
    overrides: tuple[str, ...]
    platform: str | None
    task: str | None
    steps: int
    keeps_samples: bool = False
    """Record the samples that it trains on, for the oracle."""
    by_differences: bool = False
    """Whether to compare its gradients with differences of the loss as well, on one rank."""
    only_masks: bool = False
    """Record the dropout masks of one global batch, and nothing else."""
    saves: bool = False
    """Whether it saves a checkpoint after the steps."""
    with_stand_in: bool = False
    """Whether a ``StandIn`` takes the place of the plugin that is left out."""
    only_steps: bool = False
    """Whether it leaves out the gradients of the first batch, and the moments of the modules."""

    @property
    def uses_kit_batches(self) -> bool:
        return self.base.get("data.train") == [KIT_DATASET]

    def as_request(self) -> dict[str, object]:
        return attrs.asdict(self)

    @classmethod
    def of_request(cls, request: Mapping[str, Any]) -> Side:
        data = {name: request[name] for name in attrs.fields_dict(cls)}
        return cls(
            **{**data, "enable": tuple(data["enable"]), "overrides": tuple(data["overrides"])}
        )

    def prepare(self) -> PreparedRun:
        """
        Raises:
            AscendRunError: This run cannot start.
        """
        file = None if self.file is None else Path(self.file)
        read = read_raw(file, [word for word in self.overrides if self._applies(word)])
        base = {
            key: RawValue(value, ORIGIN) for key, value in self.base.items() if self._applies(key)
        }
        given = {key: value for key, value in read.values.items() if self._applies(key)}
        values = {
            key: RawValue(value, ORIGIN) for key, value in self.values.items() if self._applies(key)
        }
        raw = RawConfig(values={**base, **given, **values}, problems=read.problems)
        raw = raw.replacing(
            COMMAND_LINE, enable=[*self.enable], platform=self.platform, task=self.task
        )
        return prepare_raw(raw, self.world_size)

    def run_request(self) -> RunRequest:
        """Return the request of this run to core, with new instances of every plugin."""
        return self.prepare().run_request(*([StandIn()] if self.with_stand_in else []))

    def _applies(self, key: str) -> bool:
        """Whether a setting is valid with this run's plugins and layout, which may differ from
        those of the file."""
        key = key.partition("=")[0].strip()
        words = key.split(".")
        if words[0] == "plugins" and len(words) > 1:
            chosen = (self.platform, self.task, self.base.get("model.family"))
            return words[1] in (*self.enable, *chosen)
        if key in layouts.KEYS.values():
            return key in self.values
        return self.values[layouts.KEYS["pp"]] > 1 or key not in layouts.OF_STAGES
