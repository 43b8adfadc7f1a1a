"""The oracle shares no code with what it checks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from ascend_run.testing import oracle

FOLDER: Final = Path(oracle.__file__).parent
ALLOWED: Final = {"torch", "attrs", *sys.stdlib_module_names}


def imports(source: str) -> Iterator[str]:
    """What a module of the oracle imports from outside of its folder."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.level != 1 or not node.module):
            yield f"{'.' * node.level}{node.module}"


def strangers(source: str) -> list[str]:
    return [
        name
        for name in imports(source)
        if name.partition(".")[0] not in ALLOWED and name != "ascend_run.types.config"
    ]


@pytest.mark.parametrize("module", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_torch_attrs_and_the_config(module: Path) -> None:
    assert strangers(module.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "from ascend_run.testing.tensors import relative_error",
        "from ascend_run.types.attention import Mask",
        "from ..models import samples",
        "import transformers",
    ],
)
def test_another_import_is_found(line: str) -> None:
    assert len(strangers(f"from .layers import Norm\nimport math\n{line}\n")) == 1
