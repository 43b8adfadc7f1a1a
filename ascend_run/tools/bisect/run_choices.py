"""The choices between two runs: what their configs differ in. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ascend_run.tools.pages.config_rows import shown_value
from ascend_run.tools.verify.layouts import KEYS

from .choices import ENABLED, NOT_ENABLED, Choice, Kind
from .recorded_runs import RecordedRun

RANKS: Final = "ranks"
"""Name of the choice of the number of ranks."""
AXES: Final = {key: axis for axis, key in KEYS.items()}
"""Config key -> name of its axis."""
_NEVER_USED: Final = frozenset(
    {
        "run.output_dir",
        "run.nproc",
        "run.timeout_seconds",
        "data.train",
        "data.cache_dir",
        "train.log_interval",
    }
)
"""Settings that have no influence on training, or that are compared in another way."""
_NOT_EXECUTED: Final = frozenset(
    {
        "data.validation",
        "data.validation_weights",
        "train.eval_interval",
        "train.eval_iters",
    }
)
"""Settings for what the compared runs leave out; so are those of checkpoints."""


def choices_between(one: RecordedRun, other: RecordedRun) -> Iterator[Choice]:
    """Yield the choices; options of a plugin that only one of the runs has belong to the plugin."""
    mine, others = one.raw.enable, other.raw.enable
    for name in dict.fromkeys((*mine, *others)):
        if (name in mine) != (name in others):
            shown = [ENABLED if name in enabled else NOT_ENABLED for enabled in (mine, others)]
            yield Choice(kind=Kind.PLUGIN, name=name, values=(shown[0], shown[1]))
    both = one.plugins & other.plugins
    for key in dict.fromkeys((*one.values, *other.values)):
        plugin = option_of(key)
        if plugin is not None and plugin not in both:
            continue
        if key == "enable" or key in _NEVER_USED or is_not_executed(key):
            continue
        values = [run.values.get(key) for run in (one, other)]
        if values[0] != values[1]:
            shown = ["not set" if value is None else shown_value(value) for value in values]
            kind = Kind.LAYOUT if key in AXES else Kind.SETTING
            yield Choice(kind=kind, name=AXES.get(key, key), values=(shown[0], shown[1]))
    if one.world_size != other.world_size:
        sizes = (str(one.world_size), str(other.world_size))
        yield Choice(kind=Kind.LAYOUT, name=RANKS, values=sizes)


def option_of(key: str) -> str | None:
    """Return the plugin that a config key is an option of."""
    words = key.split(".")
    return words[1] if words[0] == "plugins" else None


def plugin_of(choice: Choice) -> str | None:
    """Return the plugin that a choice enables, disables or configures."""
    return choice.name if choice.kind is Kind.PLUGIN else option_of(choice.name)


def is_not_executed(key: str) -> bool:
    """Return whether a setting only concerns what the compared runs leave out."""
    return key in _NOT_EXECUTED or key.startswith("checkpoint.")
