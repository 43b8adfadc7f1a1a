"""Where a plugin is tried: the first tiny models and layouts that it allows and is at work in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from ascend_run.plugin_api.layout import AXIS_KEYS, world_size
from ascend_run.plugin_api.testing.models import MODELS, trial_layout
from ascend_run.plugin_api.testing.runtime import Trial

from .check import DoesNotApply
from .subject import Subject

_CHOOSES: Final = {"platform": "platform", "task": "task", "model family": "model.family"}
"""Kind -> the config key by which a plugin of it is chosen; a feature is enabled."""
_WITHOUT_CHANCE: Final = {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
"""Ranks that hold different parts of a model drop different values."""
_LAYOUTS: Final[tuple[tuple[str, Mapping[str, int]], ...]] = (
    ("dense", {}),
    ("moe", {}),
    ("dense", {"tp": 2}),
    ("dense", {"cp": 2}),
    ("dense", {"pp": 2}),
    ("dense", {"dp": 2}),
    ("moe", {"dp": 2, "ep": 2}),
    ("moe", {"tp": 2}),
    ("moe", {"cp": 2}),
)
"""In the order in which they are asked for."""


@attrs.frozen(kw_only=True)
class Place:
    """A model in a layout, with the plugin and without it."""

    model: str
    layout: Mapping[str, int]
    chosen: Trial
    without: Trial
    """The same run but for the plugin: for a platform on the default one; for a task or a family,
    which a run cannot do without, the same."""
    idle: bool
    """Whether its manifest says that it changes nothing here."""

    @property
    def world_size(self) -> int:
        return world_size(self.layout)

    @property
    def on_one_rank(self) -> Place:
        """The same without a layout."""
        return attrs.evolve(
            self,
            layout={},
            chosen=_without_layout(self.chosen),
            without=_without_layout(self.without),
        )

    def __str__(self) -> str:
        layout = " ".join(f"{axis}={size}" for axis, size in self.layout.items()) or "one rank"
        return f"{self.model}, {layout}"


def choice_of(subject: Subject, model: str = "dense") -> Trial:
    """One rank with the plugin, what it requires and the settings of its trials."""
    facts, manifest = subject.facts, subject.manifest
    enabled = [other for other in manifest.requires if isinstance(other, str)]
    config: dict[str, Any] = {**MODELS[model], **_WITHOUT_CHANCE}
    if facts.kind in _CHOOSES:
        config[_CHOOSES[facts.kind]] = manifest.name
    else:
        enabled.append(manifest.name)
    asked = {*enabled, manifest.name}
    for key, value in subject.means.settings.items():
        if not key.startswith("plugins.") or key.split(".")[1] in asked:
            config[key] = value
    return Trial(plugins=tuple(enabled), config=config)


def places(subject: Subject) -> list[Place]:
    """Every place that it allows, the ones where it is at work first.

    Raises:
        DoesNotApply: No run can have it, for a reason that is another check's.
    """
    if subject.facts.hook_problems:
        raise DoesNotApply("no run takes its hooks, see KIT-HOOKS")
    subject.instance()
    allowed = list(_allowed(subject))
    return sorted(allowed, key=lambda place: place.idle)


def refusals(subject: Subject) -> list[str]:
    """Why it is allowed in no place, as a user would be told."""
    told = [
        problem
        for model, layout in _LAYOUTS
        for problem in subject.means.examine(*_trial(subject, model, layout)).problems
    ]
    return list(dict.fromkeys(told))


def _allowed(subject: Subject) -> Iterator[Place]:
    for model, layout in _LAYOUTS:
        trial, ranks = _trial(subject, model, layout)
        examined = subject.means.examine(trial, ranks)
        if examined.problems:
            continue
        yield Place(
            model=model,
            layout=layout,
            chosen=trial,
            without=_without(subject, trial),
            idle=subject.manifest.name in examined.idle,
        )


def _trial(subject: Subject, model: str, layout: Mapping[str, int]) -> tuple[Trial, int]:
    chosen = choice_of(subject, model)
    config = {**chosen.config, **trial_layout(layout)}
    return attrs.evolve(chosen, config=config), world_size(layout)


def _without(subject: Subject, trial: Trial) -> Trial:
    name = subject.manifest.name
    config = {k: v for k, v in trial.config.items() if not k.startswith(f"plugins.{name}.")}
    if subject.facts.kind == "platform":
        config.pop("platform")
    return attrs.evolve(trial, config=config, plugins=tuple(p for p in trial.plugins if p != name))


def _without_layout(trial: Trial) -> Trial:
    layout = {*AXIS_KEYS.values(), "parallel.sequence_parallel"}
    config = {key: value for key, value in trial.config.items() if key not in layout}
    return attrs.evolve(trial, config=config)
