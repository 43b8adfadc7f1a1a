"""The kernel names no feature: nothing below the plugins knows one by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import ascend_run
from ascend_run.registry.discovery import discover

PACKAGE = Path(ascend_run.__file__).parent
DEFAULTS = PACKAGE / "types/config.py"
"""Where the plugins stand that a run has by default; the one place that may name them."""
OTHER_MEANING = {
    "cpu": "torch's word for host memory: Tensor.cpu(), a device of that name",
    "cuda": "torch's module, behind which Megatron works on every platform",
    "npu": "torch's word for a device of that kind",
    "compile": "Python's and re's function",
    "rms-norm": "the operator of that name in the platform's table",
    "rotary": "the operator of that name, and the part of the model that it serves",
    "shared-experts": "Megatron's submodule of a layer with experts",
    "swiglu": "the operator of that name, and Megatron's option",
}
"""Name -> what else it means in code that does not mean the plugin."""
NAMES = {
    name
    for name, candidate in discover().items()
    if candidate.first_party and name not in OTHER_MEANING
}


def documentation(tree: ast.AST) -> set[ast.AST]:
    """Strings that stand by themselves."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, word) of every quoted string and identifier; documentation and comments are prose."""
    prose = documentation(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield from ((node.lineno, word) for word in re.findall(r"[\w-]+", node.value))
        for field in ("id", "attr", "arg", "name"):
            if isinstance(word := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), word.replace("_", "-")


def named_in(source: str, names: Collection[str] = NAMES) -> list[tuple[int, str]]:
    return [(line, word) for line, word in words(ast.parse(source)) if word in names]


def test_the_kernel_names_no_plugin() -> None:
    paths = [
        path
        for part in ("types", "plugin_api", "registry", "core", "prepare", "launch")
        for path in (PACKAGE / part).rglob("*.py")
        if path != DEFAULTS and "testing" not in path.parts
    ]
    found = {
        str(p.relative_to(PACKAGE)): named for p in paths if (named := named_in(p.read_text()))
    }

    assert found == {}


def test_a_name_is_found_in_messages_comparisons_and_identifiers() -> None:
    planted = 'if platform == "one":\n    f(f"--enable two {x}", the_third=1)\n'
    names = {"one", "two", "the-third"}

    assert {word for _, word in named_in(planted, names)} == names
    assert named_in('"""Prose may speak of two."""\n', names) == []
