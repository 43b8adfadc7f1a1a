"""Every hook has its own test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ascend_run.plugin_api.hookspecs import hook_points

HOOKS = sorted(hook_points(), key=len, reverse=True)
"""Longest first: ``ascend_attention_kernel`` before ``ascend_attention``."""
HERE = Path(__file__).parent


def hook_in(test: str) -> str | None:
    """The hook that a test's name begins with."""
    return next((hook for hook in HOOKS if f"{test}_".startswith(f"test_{hook}_")), None)


def definitions(path: Path) -> dict[str, ast.stmt]:
    """What a module defines at its top, by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    return found


def used_texts(name: str, known: dict[str, ast.stmt], seen: set[str]) -> Iterator[str]:
    """Every string in a definition and in the definitions that it names."""
    seen.add(name)
    for node in ast.walk(known[name]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        word = getattr(node, "id", None) or getattr(node, "attr", None)
        if word in known and word not in seen:
            yield from used_texts(word, known, seen)


def implements(hook: str, text: str) -> bool:
    """Whether a string is a hook's name, or the source of a plugin that has it."""
    return text == hook or re.search(rf"def {hook}\(", text) is not None


def hooks_under_test() -> set[str]:
    """The hooks that a test is named after and also implements, or hears of."""
    jobs = definitions(HERE / "jobs.py")
    found = set()
    for path in HERE.glob("test_*.py"):
        known = jobs | definitions(path)
        for name in definitions(path):
            hook = hook_in(name)
            if hook and any(implements(hook, text) for text in used_texts(name, known, set())):
                found.add(hook)
    return found


def test_every_hook_has_a_test_named_after_it_that_uses_it() -> None:
    assert sorted(hook_points()) == sorted(hooks_under_test())
