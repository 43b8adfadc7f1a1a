"""Read samples from files: records of a source through a data handler. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from ascend_run.plugin_api import ConfigError, DataError

from .handlers import DataHandler
from .handlers.loading import key_mapping, load_handler
from .records import MalformedRecord, Record
from .samples import Conversation, Preference, Sample
from .sources import Problems, find_sources, read_records, table_columns

_MOST_FILES: Final = 20
"""Reading stops after this number of files with problems."""


def sample_reader(name: str, map_keys: Sequence[str], wanted: type[Sample]) -> SampleReader:
    """Return a reader through a handler that makes one type of samples.

    Args:
        map_keys: See ``handlers.loading.key_mapping``.

    Raises:
        ConfigError: There is no such handler, a key cannot be mapped, or it makes other samples.
        PluginLoadError: The handler cannot be imported.
    """
    handler = load_handler(name)
    if handler.sample is not wanted:
        raise ConfigError(
            f"the data handler {name!r} makes {handler.sample.__name__} samples, and "
            f"{wanted.__name__} samples are needed here; name another handler"
        )
    return SampleReader(handler, key_mapping(handler, map_keys))


@attrs.define
class SampleReader:
    """Reads samples one at a time.

    Args:
        handler: Makes a sample of each record.
        keys: The handler's key -> the key in the source; see ``handlers.loading.key_mapping``.
    """

    handler: DataHandler
    keys: Mapping[str, str] = attrs.field(
        default=attrs.Factory(lambda self: key_mapping(self.handler, ()), takes_self=True)
    )
    count: int = attrs.field(default=0, init=False)
    """Samples read by the last ``read``."""

    def read(self, paths: Sequence[str | Path]) -> Iterator[tuple[str, Sample]]:
        """Yield each sample with its ``file:row``, in the order of the files.

        Raises:
            DataError: At the end: every problem of every file.
        """
        self.count = 0
        files, problems = find_sources(paths)
        bad = 0
        for path in files:
            found = Problems(path)
            for row, sample in self._samples(path, found):
                self.count += 1
                yield f"{path}:{row}", sample
            problems += found
            bad += bool(found)
            if bad == _MOST_FILES:
                problems.append("further files were not read")
                break
        if problems:
            raise DataError("these samples cannot be read", problems)

    def conversations(self, paths: Sequence[str | Path]) -> Iterator[tuple[str, Conversation]]:
        """Yield each sample as a conversation; the handler must make conversations."""
        for source, sample in self.read(paths):
            assert isinstance(sample, Conversation)
            yield source, sample

    def preferences(self, paths: Sequence[str | Path]) -> Iterator[tuple[str, Preference]]:
        """Yield each sample as a preference; the handler must make preferences."""
        for source, sample in self.read(paths):
            assert isinstance(sample, Preference)
            yield source, sample

    def description(self) -> Mapping[str, object]:
        """Return what determines the samples of given files, as part of a cache key."""
        return {
            "handler": self.handler.name,
            "code": f"{self.handler.convert.__module__}:{self.handler.convert.__qualname__}",
            "keys": dict(self.keys),
        }

    def problems(self, paths: Sequence[str | Path]) -> Sequence[str]:
        """Read everything, and return what is wrong, one sentence each."""
        try:
            for _ in self.read(paths):
                pass
        except DataError as error:
            return error.problems
        return ()

    def _samples(self, path: Path, problems: Problems) -> Iterator[tuple[int, Sample]]:
        columns = table_columns(path)
        lacking = None if columns is None else self.handler.lacking(columns, self.keys)
        if lacking:
            problems.add(f"has another schema: {lacking}")
            return
        is_empty = True
        for row, values in read_records(path, problems):
            is_empty = False
            try:
                yield row, self.handler.convert(Record(values, self.keys))
            except MalformedRecord as problem:
                problems.add(str(problem), row)
        if is_empty and not problems:
            problems.add("is empty; expected one record per line or row")
