"""Records of every task that reads text, of such lengths that packed rows hold unequal numbers of
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

LENGTH: Final = 192
"""Of a row. Unit: tokens, which are bytes here."""
_SIZES: Final = (60, 94, 90, 186, 92, 58, 91, 61)
"""About what each record takes of a row. The third part of a row, the half, or nearly all: so the
records of a row are unequal too."""
HELD: Final = (1, 2, 2, 3)
"""Numbers of records of the rows, if they are packed."""
NUM_RECORDS: Final = len(_SIZES)
DOCUMENTS: Final[Mapping[str, int]] = {"dpo": 2, "orm": 2, "prm": 1, "sft": 1, "simpo": 2}
"""Task -> documents of a record: each answer is one, with its prompt."""
_TEMPLATE_TOKENS: Final = 19
"""What the template adds to a question and its answer."""


def write_records(folder: Path, task: str) -> Path:
    """Write a file that is an epoch of ``NUM_RECORDS`` rows, or of ``len(HELD)`` packed ones."""
    path = folder / f"unequal-{task}.jsonl"
    records = [_record(task, number, size) for number, size in enumerate(_SIZES)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def _record(task: str, number: int, size: int) -> dict[str, Any]:
    if task == "prm":
        first, second = size // 3, size - size // 3
        steps = f"{_digits(number, first - 1)}*{_digits(number + 10, second - 1)}*"
        return {"input": steps, "value": ["+", "+-"[number % 2]]}
    if DOCUMENTS[task] == 1:
        answer = _digits(number + 10, size // 8)
        asked = _digits(number, size - _TEMPLATE_TOKENS - len(answer))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return {"messages": turns}
    chosen, rejected = _digits(number + 10, size // 16), _digits(number + 20, size // 16 + 2)
    left = size // 2 - _TEMPLATE_TOKENS - size // 16 - 1
    return {
        "conversations": [{"from": "human", "value": _digits(number, left)}],
        "chosen": {"from": "gpt", "value": chosen},
        "rejected": {"from": "gpt", "value": rejected},
    }


def _digits(number: int, count: int) -> str:
    """Return text that no other number has."""
    return str(7 ** (number + 200))[:count]
