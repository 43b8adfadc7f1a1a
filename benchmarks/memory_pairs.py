"""A file of pairs whose answers fill most of a sample: the estimate takes all tokens as trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from .campaigns.tiny_runs import data_folder

LENGTH: Final = 512
"""Tokens of a sample, which holds one pair. Bytes are tokens."""
_PROMPT: Final = 24
"""Tokens of a rendered prompt, and more."""


def pair_values(task: str) -> Mapping[str, Any]:
    """Write the file; return config key -> value of a run that reads it."""
    folder = data_folder()
    path = folder / "long-pairs.jsonl"
    path.write_text("".join(_pair(number) for number in range(40)))
    return {
        "task": task,
        "data.train": [str(path)],
        "data.tokenizer": str(folder),
        "data.seq_length": LENGTH,
        "train.micro_batch_size": 1,
        f"plugins.{task}.template": "chatml",
    }


def _pair(number: int) -> str:
    """A line, unlike the others."""
    size = LENGTH // 2 - _PROMPT
    record = {
        "conversations": [{"from": "human", "value": "?"}],
        "chosen": {"from": "gpt", "value": f"{number:0{size - 4}}"},
        "rejected": {"from": "gpt", "value": f"{number + 1:0{size - 8}}"},
    }
    return json.dumps(record) + "\n"
