"""Choose the tiny models and layouts to try a plugin in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from ascend_run.testing.models import MODELS, trial_layout
from ascend_run.testing.runtime import Trial
from ascend_run.testing.small_settings import CHOSEN_BY, settings_of
from ascend_run.types.layout import AXIS_KEYS, world_size

from .check import DoesNotApply
from .subject import Subject

_NO_DROPOUT: Final = {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
"""Dropout masks depend on the layout."""
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
"""In order of preference."""


@attrs.frozen(kw_only=True)
class Scenario:
    """A model in a layout, with and without the plugin."""

    model: str
    layout: Mapping[str, int]
    chosen: Trial
    without: Trial
    """The same trial without the plugin: for a platform, on the default one; for a task or a model
    family, which every run needs, the same trial."""
    idle: bool
    """Whether its manifest declares that it is idle here."""

    @property
    def world_size(self) -> int:
        return world_size(self.layout)

    @property
    def on_one_rank(self) -> Scenario:
        """The same scenario on one rank."""
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
    """Return the trial on one rank with the plugin, its requirements, the settings under which it
    acts in a small model, and ``--ascend-set``."""
    facts, manifest = subject.facts, subject.manifest
    enabled = [other for other in manifest.requires if isinstance(other, str)]
    small = settings_of(manifest, of_model=True)
    config: dict[str, Any] = {**MODELS[model], **_NO_DROPOUT, **small}
    if facts.kind in CHOSEN_BY:
        config[CHOSEN_BY[facts.kind]] = manifest.name
    else:
        enabled.append(manifest.name)
    present = {*enabled, manifest.name}
    for key, value in subject.means.settings.items():
        if not key.startswith("plugins.") or key.split(".")[1] in present:
            config[key] = value
    return Trial(plugins=tuple(enabled), config=config)


def scenarios(subject: Subject) -> list[Scenario]:
    """Return every scenario in which it can run, those where it is active first.

    Raises:
        DoesNotApply: No run can use it, which another check reports.
    """
    if subject.facts.hook_problems:
        raise DoesNotApply("no run accepts its hooks, see KIT-HOOKS")
    subject.instance()
    allowed = list(_allowed(subject))
    return sorted(allowed, key=lambda scenario: scenario.idle)


def refusals(subject: Subject) -> list[str]:
    """Return why it cannot run in any scenario, as in the user's error messages."""
    problems = [
        problem
        for model, layout in _LAYOUTS
        for problem in subject.means.examine(*_trial(subject, model, layout)).problems
    ]
    return list(dict.fromkeys(problems))


def _allowed(subject: Subject) -> Iterator[Scenario]:
    for model, layout in _LAYOUTS:
        trial, ranks = _trial(subject, model, layout)
        examined = subject.means.examine(trial, ranks)
        if examined.problems:
            continue
        yield Scenario(
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
    name, kind = subject.manifest.name, subject.facts.kind
    if kind in CHOSEN_BY and kind != "platform":
        return trial
    config = {k: v for k, v in trial.config.items() if not k.startswith(f"plugins.{name}.")}
    if kind == "platform":
        config.pop("platform")
    return attrs.evolve(trial, config=config, plugins=tuple(p for p in trial.plugins if p != name))


def _without_layout(trial: Trial) -> Trial:
    layout = {*AXIS_KEYS.values(), "parallel.sequence_parallel"}
    config = {key: value for key, value in trial.config.items() if key not in layout}
    return attrs.evolve(trial, config=config)
