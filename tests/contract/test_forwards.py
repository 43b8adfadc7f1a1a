"""There is one way to wrap a module's forward: the chain of links. Nothing else sets a forward."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import ascend_run

PACKAGE: Final = Path(ascend_run.__file__).parent
OWNER: Final = "core/model/forward_chain.py"
ALLOWED: Final = {
    OWNER: {"module.forward"},
    "ops/recomputed.py": {"self.forward"},
    "testing/gradients/functions.py": {"cast('Any', function).forward"},
}
"""File -> what it sets. In ops it is a field of a record, with the forward that a saved tensor
belongs to; in the kit it is the forward of autograd functions, which are no modules."""
NAMED: Final = ("setattr", "__setattr__", "delattr", "__delattr__", "object", "update")
"""Functions that set an attribute by its name; ``object`` is that of ``mock.patch``."""


def forwards_set(source: str) -> Iterator[str]:
    """Yield the expressions by which a forward is set or deleted."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr="forward", ctx=ast.Store() | ast.Del()):
                yield ast.unparse(node)
            case ast.Subscript(slice=ast.Constant(value="forward"), ctx=ast.Store() | ast.Del()):
                yield ast.unparse(node)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in NAMED:
                by_name = any(ast.unparse(argument) == "'forward'" for argument in node.args)
                if by_name or any(keyword.arg == "forward" for keyword in node.keywords):
                    yield ast.unparse(node)


def test_only_the_chain_sets_a_forward() -> None:
    found = {
        str(path.relative_to(PACKAGE)): {*forwards_set(text)}
        for path in sorted(PACKAGE.rglob("*.py"))
        if "forward" in (text := path.read_text(encoding="utf-8"))
    }
    assert {file: names for file, names in found.items() if names} == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "layer.mlp.forward = outer",
        "self.layer.forward: Forward = outer",
        "layer.forward, layer.other = outer, inner",
        "for layer.forward in forwards: pass",
        "del layer.forward",
        "setattr(layer, 'forward', outer)",
        "object.__setattr__(layer, 'forward', outer)",
        "delattr(layer, 'forward')",
        "vars(layer)['forward'] = outer",
        "layer.__dict__.update(forward=outer)",
        "mock.patch.object(layer, 'forward', outer)",
    ],
)
def test_a_forward_that_is_set_is_found(source: str) -> None:
    assert len([*forwards_set(source)]) == 1


@pytest.mark.parametrize(
    "source",
    [
        "forward = layer.forward",
        "layer.forward(x)",
        "def forward(self, x): pass",
        "own = vars(layer)['forward']",
        "class Record:\n    forward: Forward",
    ],
)
def test_reading_and_defining_a_forward_is_none(source: str) -> None:
    assert [*forwards_set(source)] == []
