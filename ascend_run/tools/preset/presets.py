"""Presets: published models, read from the records in the folder ``records``. No torch."""

from __future__ import annotations

import difflib
import functools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

import attrs

from ascend_run.plugin_api.error_text import NONE
from ascend_run.plugin_api.errors import ConfigError

_CONTEXTS: Final = ("max_position_embeddings", "n_positions", "model_max_length", "seq_length")
"""Keys of a config.json that limit the sequence length."""
_LONGEST_DEFAULT: Final = 4096


@attrs.frozen(kw_only=True)
class Preset:
    """One published size of a model; ``records/README.md`` describes the records."""

    name: str
    family: str
    """Our model family, Hugging Face's ``model_type``."""
    config: Mapping[str, Any]
    """Keys of the model's ``config.json`` that define it, without ``model_type``."""
    published: str
    """Parameter count as published, such as ``6.74B``."""
    parameters: int
    """Exact parameter count."""
    published_without_embedding: bool = False
    """Whether that count leaves out the embedding."""
    published_cut_off: bool = False
    """Whether its last digit is cut off, not rounded."""
    source: str
    template: str | None = None
    """Name of a chat template; None: the tokenizer's own."""
    seq_length: int | None = None
    """Sequence length of a run; None: the context, at most 4096. Unit: tokens."""
    note: str = ""

    @property
    def config_json(self) -> dict[str, Any]:
        """The keys with ``model_type``, as in a Hugging Face folder."""
        return {"model_type": self.family, **self.config}

    @property
    def context(self) -> int:
        """The maximum sequence length, by the record's own key. Unit: tokens."""
        return int(next(self.config[name] for name in _CONTEXTS if name in self.config))

    @property
    def default_seq_length(self) -> int:
        """The sequence length of a run. Unit: tokens."""
        return self.seq_length or min(self.context, _LONGEST_DEFAULT)


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Return every preset by name, sorted.

    Raises:
        ValueError: Two records have the same name.
    """
    found: dict[str, Preset] = {}
    for file in (files(__package__) / "records").iterdir():
        family, dot, ending = file.name.partition(".")
        if (dot, ending) != (".", "toml"):
            continue
        for preset in _family_presets(family, tomllib.loads(file.read_text("utf-8"))):
            if found.setdefault(preset.name, preset) is not preset:
                raise ValueError(f"two records have the name {preset.name}")
    return MappingProxyType({name: found[name] for name in sorted(found, key=_order)})


def find_preset(name: str) -> Preset:
    """Return a preset by name; case does not matter.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    known = presets()
    if (preset := known.get(name.lower())) is not None:
        return preset
    near = [one for one in known if one.startswith(f"{name.lower()}-")]
    near = near or difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "see ascend-run preset list"
    raise ConfigError(f"no preset {name!r}; {hint}")


def _family_presets(family: str, record: Mapping[str, Any]) -> Iterator[Preset]:
    for series, shared in record.items():
        common = {key: value for key, value in shared.items() if key not in ("sizes", "config")}
        for size, own in shared["sizes"].items():
            values = {**common, **{key: own[key] for key in own if key != "config"}}
            yield Preset(
                name=f"{series}-{size}",
                family=family,
                config=_config({**shared.get("config", {}), **own.get("config", {})}),
                **values,
            )


def _config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType({k: None if v == NONE else v for k, v in values.items()})


def _order(name: str) -> list[tuple[float, str]]:
    """Sort key that compares the numbers in names as numbers."""
    parts = re.findall(r"[0-9]+(?:\.[0-9]+)?|[^0-9]+", name)
    return [(float(part), "") if part[0].isdigit() else (math.inf, part) for part in parts]
