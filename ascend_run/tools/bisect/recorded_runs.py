"""Two run folders: what each was configured with, and what can be compared. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.core.run_files import CONFIG_NAME
from ascend_run.plugin_api.errors import AscendRunError, DataError
from ascend_run.prepare.config.raw import RawConfig
from ascend_run.prepare.config.reading import raw_of_toml
from ascend_run.prepare.config.toml_document import TomlProblem
from ascend_run.tools.pages.fingerprint_file import read_fingerprints
from ascend_run.tools.pages.record_reading import read_table
from ascend_run.tools.pages.run_differences import Difference, differences
from ascend_run.tools.pages.run_folder import RunData, read_run
from ascend_run.tools.pages.run_records import LockedPlugin
from ascend_run.tools.pages.step_differences import FirstDifference, compare_steps

OTHER_DATA: Final = "the runs read other data, so that they cannot be compared"
NOTHING: Final = "nothing to bisect"


@attrs.frozen(kw_only=True)
class RecordedRun:
    """A run as its folder describes it."""

    folder: RunData
    raw: RawConfig
    """The resolved config."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Config key -> value; keys that the file leaves out have the default of Megatron."""
        return {key: given.value for key, given in self.raw.values.items()}

    @property
    def world_size(self) -> int:
        return self.folder.plan.layout.world_size or self.raw.nproc

    @property
    def plugins(self) -> frozenset[str]:
        """Every plugin of the run: features, platform, task and model family."""
        raw = self.raw
        return frozenset((*raw.enable, raw.platform, raw.task, raw.family))


def read_runs(paths: Sequence[Path]) -> tuple[RecordedRun, RecordedRun]:
    """Read two run folders.

    Raises:
        AscendRunError: One of them is not a run folder, or has no config.
    """
    found, errors = [], []
    for path in paths:
        try:
            found.append(_read(path))
        except AscendRunError as error:
            errors.append(error)
    if len(errors) > 1:
        raise DataError("the runs cannot be read", [_one_line(error) for error in errors])
    if errors:
        raise errors[0]
    one, other = found
    if one.folder.path.resolve() == other.folder.path.resolve():
        raise DataError(f"{NOTHING}: both are the run folder {paths[0]}")
    return one, other


def check_same_data(one: RecordedRun, other: RecordedRun) -> None:
    """
    Raises:
        DataError: The runs train on other datasets, or on files with other contents.
    """
    names = [run.folder.config.data.train for run in (one, other)]
    contents = [
        [run.folder.environment.data.get(name) for name in run.folder.config.data.train]
        for run in (one, other)
    ]
    if names[0] != names[1]:
        if contents[0] == contents[1] and all(contents[0]):
            return
        shown = [", ".join(of_run) or "none" for of_run in names]
        raise DataError(OTHER_DATA, [f"data.train is {shown[0]} in A, and {shown[1]} in B"])
    found = [d for d in differences(one.folder, other.folder) if d.kind == "data"]
    if found:
        raise DataError(OTHER_DATA, [_shown(difference) for difference in found])


def first_difference(
    one: RecordedRun, other: RecordedRun
) -> tuple[FirstDifference | None, tuple[str, ...]]:
    """Return the first different step by the runs' fingerprints, and notes on why it is unknown.

    Raises:
        DataError: The runs are equal in all common steps.
    """
    try:
        entries = [read_fingerprints(run.folder.path).entries for run in (one, other)]
        steps = compare_steps(entries[0], entries[1])
    except DataError as error:
        note = f"the first different step of the runs is not known: {_one_line(error)}"
        return None, (note,)
    if steps.first is None:
        first, last = steps.common[0], steps.common[-1]
        raise DataError(f"{NOTHING}: the runs are identical over steps {first} to {last}")
    return steps.first, ()


def not_searched(one: RecordedRun, other: RecordedRun) -> tuple[str, ...]:
    """Return notes on what differs besides the config: what is installed here runs."""
    found = [
        _shown(difference)
        for difference in differences(one.folder, other.folder)
        if difference.kind in ("version", "device") and difference.name != "platform"
    ]
    return tuple(f"not searched, as all comparisons run here: {text}" for text in found)


def with_other_code(run: RecordedRun, installed: Mapping[str, object]) -> list[str]:
    """Return the plugins whose code is not that of the run.

    Args:
        installed: The lock of the same plugins here.
    """
    found = read_table(installed, LockedPlugin)
    locked = run.folder.lock
    return [name for name in locked if name in found and locked[name].sha256 != found[name].sha256]


def _read(path: Path) -> RecordedRun:
    folder = read_run(path)
    file = path / CONFIG_NAME
    try:
        raw = raw_of_toml(file.read_text("utf-8"), CONFIG_NAME)
    except (OSError, UnicodeDecodeError, TomlProblem, RecursionError) as error:
        raise _no_config(path, getattr(error, "strerror", None) or str(error)) from None
    problems = [*raw.problems] or ([] if raw.values else ["it is empty"])
    if problems:
        raise _no_config(path, "; ".join(problems))
    return RecordedRun(folder=folder, raw=raw)


def _no_config(path: Path, reason: str) -> DataError:
    return DataError(
        f"the run in {path} has no config to compare",
        [f"{CONFIG_NAME}: {reason}; name a run folder that holds its resolved config"],
    )


def _shown(difference: Difference) -> str:
    one, other = difference.values
    return f"{difference.kind} {difference.name}: {one} in A, {other} in B"


def _one_line(error: AscendRunError) -> str:
    return ": ".join((error.headline, "; ".join(error.problems))) if error.problems else str(error)
