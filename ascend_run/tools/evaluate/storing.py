"""The folder of an evaluation: ``results.json`` and ``results.html``. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ascend_run.core.files import replace_file
from ascend_run.plugin_api import DataError, StorageError
from ascend_run.text.strict_json import parse

from .page import render_page
from .results import HarnessScore, Judged, Perplexity, Programs, Results, TaskResult

_FORMAT: Final = 1
_JSON: Final = "results.json"
_PAGE: Final = "results.html"


def require_new(folder: Path) -> None:
    """
    Raises:
        StorageError: The folder exists, or the one that it is to be in does not.
    """
    if os.path.lexists(folder):
        raise StorageError(f"{folder} exists; name a new folder with --output")
    if not folder.absolute().parent.is_dir():
        raise StorageError(f"{folder.parent} is not a folder; create it, or name another one")


def write_results(results: Results, folder: Path, *, written: float) -> None:
    """Write the results of an evaluation to a new folder.

    Args:
        written: Unix time, for the page.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        folder.mkdir()
        content = {"format": _FORMAT, **results.record(answers=True)}
        replace_file(folder / _JSON, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
        replace_file(folder / _PAGE, render_page(results, written=written))
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from None


def read_results(path: Path) -> Results:
    """Read what ``write_results`` wrote.

    Raises:
        DataError: It is missing or malformed.
    """
    file = path / _JSON if path.is_dir() else path
    try:
        content = parse(file.read_bytes())
    except OSError as error:
        hint = "; name the folder of an evaluation, as written by --output"
        raise DataError(f"{file} cannot be read: {error.strerror}{hint}") from None
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from None
    try:
        if content["format"] != _FORMAT:
            raise DataError(f"{file} has the format {content['format']!r}; expected {_FORMAT}")
        return Results(
            model=content["model"],
            perplexities=tuple(map(_perplexity, content["perplexity"])),
            tasks=tuple(map(_task, content["tasks"])),
            harness=tuple(map(_harness_score, content.get("lm_eval", ()))),
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} is no result of an evaluation: {error}") from None


def _perplexity(record: Mapping[str, Any]) -> Perplexity:
    return Perplexity(**{name: value for name, value in record.items() if name != "perplexity"})


def _harness_score(record: Mapping[str, Any]) -> HarnessScore:
    value = math.nan if record["value"] is None else record["value"]
    return HarnessScore(**{**record, "value": value})


def _task(record: Mapping[str, Any]) -> TaskResult:
    judged = []
    for fields in record["answers"]:
        pairs = tuple((label, value) for label, value in fields["log_probabilities"])
        judged.append(Judged(**{**fields, "log_probabilities": pairs}))
    return TaskResult(
        task=record["task"],
        form=record["form"],
        scored_by=record["scored_by"],
        judged=tuple(judged),
        programs=Programs(**record["programs"]) if "programs" in record else None,
    )
