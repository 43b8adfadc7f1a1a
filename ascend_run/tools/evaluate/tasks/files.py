"""Files of benchmarks: where they are, and their rows."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ascend_run.text.sources import Problems, read_records
from ascend_run.tools.evaluate.prompts import Question, Subject

LETTERS: Final = "ABCD"
_MOST_PROBLEMS: Final = 20
Rows = Callable[[Path, Problems], Iterator[Question]]


def split_files(path: Path, splits: Sequence[str], suffix: str) -> tuple[list[Path], Path]:
    """Return the files to evaluate, sorted, and the folder that may have their examples.

    Args:
        path: Of the whole benchmark, of one split, or of one file.
        splits: Folders of the whole benchmark; the first that exists counts.
    """
    if path.is_file():
        return [path], path.parent.parent / "dev"
    folder = next((path / name for name in splits if (path / name).is_dir()), path)
    return sorted(folder.glob(f"*{suffix}")), folder.parent / "dev"


def exam_subjects(
    path: Path, problems: list[str], rows: Rows, *, splits: Sequence[str], suffix: str
) -> list[Subject]:
    """Read an exam with a file per subject, in a folder per split; ``dev`` has the examples."""
    files, dev = split_files(path, splits, suffix)
    if not files:
        problems.append(f"{path}: no files ending in {suffix}")
    found = []
    for file in files:
        name = re.sub(r"_(?:test|val|dev)$", "", file.stem)
        beside = [dev / f"{name}{ending}{suffix}" for ending in ("_dev", "")]
        examples = next((one for one in beside if one.is_file() and one != file), None)
        found.append(
            Subject(
                name=name,
                questions=questions_of(file, rows, problems),
                examples=() if examples is None else questions_of(examples, rows, problems),
            )
        )
    return found


def questions_of(file: Path, rows: Rows, problems: list[str]) -> tuple[Question, ...]:
    """Read a file; what cannot be read goes to ``problems``."""
    found = Problems(file)
    try:
        questions = tuple(rows(file, found))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        found.add(f"cannot be read: {getattr(error, 'strerror', None) or error}")
        questions = ()
    if not questions and not found:
        found.add("has no rows")
    problems += found
    return questions


def json_rows(file: Path, problems: Problems) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the objects of a file of JSON lines with their lines."""
    yield from read_records(file, problems)


def csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file that are not empty, with the line at which each begins."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream)
        begin = 1
        for row in reader:
            if row:
                yield begin, row
            begin = reader.line_num + 1


def text_field(record: Mapping[str, Any], key: str, row: int, problems: Problems) -> str | None:
    """Return a field that is a text; otherwise note what it is."""
    value = record.get(key)
    if isinstance(value, str) and value.strip():
        return value
    found = "nothing" if key not in record else "no text" if value == "" else type(value).__name__
    problems.add(f"expected text under key {key!r}, got {found}", row)
    return None


def exam_question(values: Sequence[str], row: int, problems: Problems) -> Question | None:
    """Return a question of the columns question, A, B, C, D, answer."""
    text, *choices, answer = values
    answer = answer.strip()
    if answer not in LETTERS or len(answer) != 1:
        problems.add(f"expected an answer A, B, C or D, got {answer!r}", row)
        return None
    return Question(
        number=row, text=text, expected=answer, labels=tuple(LETTERS), choices=tuple(choices)
    )


def headed_exam_rows(file: Path, problems: Problems) -> Iterator[Question]:
    """Yield the questions of a CSV file whose header names question, A, B, C, D and answer."""
    rows = csv_rows(file)
    _, header = next(rows, (1, []))
    names = [name.strip() for name in header]
    lowered = [name.lower() if len(name) > 1 else name for name in names]
    wanted = ("question", *LETTERS, "answer")
    missing = [name for name in wanted if name not in lowered]
    if missing:
        hint = "; its test split has no answers: evaluate val" if missing == ["answer"] else ""
        problems.add(f"has no column {', '.join(missing)}{hint}")
        return
    places = [lowered.index(name) for name in wanted]
    for row, values in rows:
        if len(values) != len(names):
            problems.add(f"has {len(values)} columns; the header has {len(names)}", row)
        elif question := exam_question([values[at] for at in places], row, problems):
            yield question
