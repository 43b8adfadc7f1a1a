"""Benchmarks from local files in their public formats: loader, wording and scorer of each.

Import no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import agieval, bbh, boolq, ceval, cmmlu, gsm8k, humaneval, mmlu
from .task import Task

TASKS: Final[Mapping[str, Task]] = {
    module.TASK.name: module.TASK
    for module in (agieval, bbh, boolq, ceval, cmmlu, gsm8k, humaneval, mmlu)
}
