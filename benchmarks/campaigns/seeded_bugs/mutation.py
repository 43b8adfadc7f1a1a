"""A function that is not as it was written, for the length of a block.

The function object stays; only its code is another. Code that holds it (a class, a module that
imported it by name, an autograd Function) runs the other code.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any


@contextmanager
def mutated(target: str, old: str, new: str) -> Iterator[None]:
    """Run a function as if ``old`` in its source were ``new``.

    Args:
        target: ``package.module:Class.method`` or ``package.module:function``.
        old: Stands in the function's source once.

    Raises:
        LookupError: ``old`` does not stand there, or not once: the code has moved on.
    """
    found = resolve(target)
    function = _plain(found)
    original, other = function.__code__, _compiled(function, target, old, new)
    _forget(found)
    function.__code__ = other
    try:
        yield
    finally:
        function.__code__ = original
        _forget(found)


def resolve(target: str) -> Any:
    """What a target names, as its class or module holds it."""
    module_name, _, path = target.partition(":")
    place: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        place = getattr(place, part)
    return inspect.getattr_static(place, name)


def _plain(found: Any) -> FunctionType:
    """The function inside of methods, caches and decorators."""
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, functools.cached_property):
        found = found.func
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType), found
    return found


def _forget(found: Any) -> None:
    """Drop what a cached function has answered."""
    if hasattr(found, "cache_clear"):
        found.cache_clear()


def _compiled(function: FunctionType, target: str, old: str, new: str) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise LookupError(f"{target}: {old!r} stands there {source.count(old)} times, expected 1")
    tree = ast.parse(source.replace(old, new))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    # Its free variables (``super()`` has one) are bound by a function around it.
    free = function.__code__.co_freevars
    outer = ast.parse(f"def around({', '.join(free)}):\n    pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [definition]
    flags = function.__code__.co_flags & _annotations_flag()
    module = ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))
    compiled = compile(module, f"<{target}, mutated>", "exec", flags=flags, dont_inherit=True)
    code = _inner(_inner(compiled, "around"), definition.name)
    assert code.co_freevars == free, f"{target}: a mutation may not change the free variables"
    return code


def _inner(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _annotations_flag() -> int:
    import __future__

    return __future__.annotations.compiler_flag
