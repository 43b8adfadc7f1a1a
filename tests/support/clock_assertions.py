"""Finds assertions on a clock in the source of tests. How long something takes depends on the
machine, so it belongs in ``benchmarks`` and not in a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

CLOCKS: Final = {
    "time": (
        *("time", "monotonic", "perf_counter", "process_time", "thread_time"),
        *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns", "thread_time_ns"),
    ),
    "timeit": ("timeit", "repeat", "default_timer"),
    "os": ("times",),
}
"""Module -> its functions that read a clock."""
KEEPS: Final = frozenset({"min", "max", "sum", "abs", "round", "float", "int", "sorted", "list"})
"""Functions that return a time if an argument is one; other functions do not, such as ``select``
with a timeout."""


def clock_assertions(source: str) -> Iterator[str]:
    """Yield ``line: text`` of each assertion that compares a clock or a value derived from one.

    Follows names through assignments, ``append`` and functions of the same module; an upper bound
    on a reading ``["..._seconds"]`` counts too. A loop that polls until a deadline is no assertion.
    """
    tree = ast.parse(source)
    times = _Times(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and any(
            isinstance(part, ast.Compare) and (times.holds(part) or _bounds_seconds(part))
            for part in ast.walk(node.test)
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _bounds_seconds(compared: ast.Compare) -> bool:
    """Return whether it is an upper bound on a measured reading."""
    below = isinstance(compared.ops[0], ast.Lt | ast.LtE)
    above = isinstance(compared.ops[0], ast.Gt | ast.GtE)
    match compared.left if below else compared.comparators[0]:
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return (below or above) and key.endswith("seconds")
    return False


class _Times:
    """The names of a module that hold times."""

    def __init__(self, tree: ast.Module) -> None:
        self._clocks = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name in CLOCKS.get(node.module or "", ())
        }
        self._names: set[str] = set()
        before = -1
        while len(self._names) > before:  # a name may be used before its assignment
            before = len(self._names)
            for node in ast.walk(tree):
                self._names.update(self._made_by(node))

    def holds(self, node: ast.AST) -> bool:
        """Return whether an expression contains a clock's value."""
        if isinstance(node, ast.Name):
            return node.id in self._names
        if isinstance(node, ast.Call):
            return self._is_clock(node.func) or self._passes(node)
        if isinstance(node, ast.Lambda):
            return False
        return any(map(self.holds, ast.iter_child_nodes(node)))

    def _passes(self, call: ast.Call) -> bool:
        """Return whether a call returns a time: a function of this module, or one of KEEPS."""
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        of_times = isinstance(call.func, ast.Attribute) and (
            self.holds(call.func.value)
            or (isinstance(call.func.value, ast.Name) and call.func.value.id == "statistics")
        )
        if name in KEEPS or (of_times and call.args):
            return any(map(self.holds, call.args))
        return of_times or name in self._names

    def _is_clock(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            return function.attr in CLOCKS.get(function.value.id, ())
        return isinstance(function, ast.Name) and function.id in self._clocks

    def _made_by(self, node: ast.AST) -> Iterator[str]:
        """Yield the names that a statement assigns a time to."""
        match node:
            case ast.Assign(targets=targets, value=value) if self.holds(value):
                yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
            case (
                ast.AugAssign(target=ast.Name(id=name), value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
            ) if self.holds(value):
                yield name
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="append" | "add"), args=[value]
            ) if self.holds(value):
                yield name
            case ast.FunctionDef(name=name):
                returned = (
                    n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value
                )
                if any(map(self.holds, returned)):
                    yield name
