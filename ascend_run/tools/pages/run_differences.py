"""Compare the conditions of two runs: config, plugins, versions, device, data files, layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from .fingerprint_file import Entry
from .run_folder import RunData
from .run_records import FileIdentity

_PLACE_ONLY: Final = frozenset({"run.output_dir"})
"""Settings for the location of a run, which always differ."""
_SHOWN_HASH: Final = 12
"""Characters of a hash."""


@attrs.frozen(kw_only=True)
class Difference:
    """One difference between the runs."""

    kind: str
    """``config``, ``plugin``, ``version``, ``device``, ``data``, ``layout``, ``environment``."""
    name: str
    values: tuple[str, str]
    origins: tuple[str, str] = ("", "")
    """Origins of config values."""


def differences(
    one: RunData, other: RunData, first_data: tuple[Entry, Entry] | None = None
) -> list[Difference]:
    """Yield all differences, the most likely causes first.

    Args:
        first_data: The entries of the first step whose data differ.
    """
    return [
        *_config(one, other),
        *_plugins(one, other),
        *_tables("version", _versions(one), _versions(other)),
        *_tables("device", _device(one), _device(other)),
        *_data(one, other),
        *(_position(*first_data) if first_data is not None else ()),
        *_tables("layout", _layout(one), _layout(other)),
        *_tables("environment", one.plan.environment, other.plan.environment),
    ]


def _config(one: RunData, other: RunData) -> Iterator[Difference]:
    tables = [{row.name: row for row in run.config_rows} for run in (one, other)]
    origins = [run.plan.origins for run in (one, other)]
    for name in dict.fromkeys(name for table in tables for name in table):
        rows = [table.get(name) for table in tables]
        values = ["" if row is None else row.value for row in rows]
        if values[0] == values[1] or name in _PLACE_ONLY:
            continue
        # Missing keys have the default of the platform, task or family in the plan.
        came_from = [
            str(known.get(name, "")) if row is None else row.origin
            for row, known in zip(rows, origins, strict=True)
        ]
        yield Difference(
            kind="config",
            name=name,
            values=(values[0] or "not set", values[1] or "not set"),
            origins=(came_from[0], came_from[1]),
        )


def _plugins(one: RunData, other: RunData) -> Iterator[Difference]:
    orders = [[plugin.name for plugin in run.plan.plugins] for run in (one, other)]
    for name in dict.fromkeys([*one.lock, *other.lock]):
        first, second = one.lock.get(name), other.lock.get(name)
        if first is None or second is None:
            shown = ["not enabled" if lock is None else "enabled" for lock in (first, second)]
            yield Difference(kind="plugin", name=name, values=(shown[0], shown[1]))
            continue
        for field, values in (
            ("distribution", (first.distribution, second.distribution)),
            ("version", (first.version, second.version)),
            ("code", (first.sha256, second.sha256)),
        ):
            if values[0] != values[1]:
                width = _SHOWN_HASH if field == "code" else None
                shown = [value[:width] or "not recorded" for value in values]
                yield Difference(kind="plugin", name=f"{name} {field}", values=(shown[0], shown[1]))
    both = {*orders[0]} & {*orders[1]}
    in_order = [" ".join(name for name in order if name in both) for order in orders]
    if in_order[0] != in_order[1]:
        yield Difference(kind="plugin", name="order", values=(in_order[0], in_order[1]))


def _versions(run: RunData) -> Mapping[str, object]:
    return {**run.plan.versions, **run.environment.versions}


def _device(run: RunData) -> Mapping[str, object]:
    """With what was left to it, and it has chosen."""
    return {
        "platform": run.plan.device or None,
        **run.environment.device,
        **run.environment.machine_choices,
    }


def _data(one: RunData, other: RunData) -> Iterator[Difference]:
    """Files with the same name and different content; names are compared in the config."""
    files = [run.environment.data for run in (one, other)]
    for prefix in files[0].keys() & files[1].keys():
        for part, first in files[0][prefix].items():
            second = files[1][prefix].get(part)
            if first != second:
                values = (_content(first), _content(second))
                yield Difference(kind="data", name=f"{prefix}.{part}", values=values)


def _position(one: Entry, other: Entry) -> Iterator[Difference]:
    """Data position of the runs, and the samples that they read."""
    if one.consumed_samples != other.consumed_samples:
        values = (str(one.consumed_samples), str(other.consumed_samples))
        yield Difference(kind="data", name=f"position after step {one.step}", values=values)
    if one.batch != other.batch and one.batch is not None and other.batch is not None:
        values = (one.batch, other.batch)
        yield Difference(kind="data", name=f"samples of step {one.step}", values=values)


def _content(file: FileIdentity | None) -> str:
    if file is None:
        return "no such file"
    return f"{file.size_bytes} bytes, sha256 {file.sha256_of_ends[:_SHOWN_HASH]}"


def _layout(run: RunData) -> Mapping[str, Any]:
    layout = run.plan.layout
    sizes = {**layout.axes, **layout.expert_axes}
    return {"ranks": layout.world_size, **sizes, "stages": layout.stages or None}


def _tables(
    kind: str, one: Mapping[str, object], other: Mapping[str, object]
) -> Iterator[Difference]:
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            yield Difference(
                kind=kind, name=name, values=(_shown(one.get(name)), _shown(other.get(name)))
            )


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
