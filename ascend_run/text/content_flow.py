"""Prove that a chat template copies the contents of messages and never reads them. No torch.

Such a template renders all conversations of the same roles to the same text around their contents,
if none is blank. The proof follows the contents through the template's syntax tree, whatever branch
is taken: they may be assigned, concatenated, trimmed and printed. Anything else reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Final

from jinja2 import nodes

_TYPE_TESTS: Final = ("defined", "undefined", "none", "string", "mapping", "sequence", "iterable")
"""Tests whose result is the same for every text that is not blank."""


class _Kind(Enum):
    """What an expression may be."""

    CLEAN = "independent of contents"
    TEXT = "a text with contents in it"
    MESSAGE = "a message"
    MESSAGES = "a list of messages"
    NAMESPACE = "a namespace, or the state of a loop"


class _Reads(Exception):
    """The template may read a content."""


def copies_contents(tree: nodes.Template) -> bool:
    """Return whether the output depends on contents only by copying them, trimmed or not.

    The messages have a role and a content that is not blank, and nothing else.
    """
    flow = _Flow({"messages": _Kind.MESSAGES})
    before: dict[str, _Kind] = {}
    try:
        while before != flow.kinds:  # until no assignment makes a name more than it was
            before = dict(flow.kinds)
            flow.statements(tree.body)
    except _Reads:
        return False
    return True


class _Flow:
    """The kinds of all names of a template, each joined over its assignments."""

    def __init__(self, kinds: dict[str, _Kind]) -> None:
        self.kinds = kinds

    def statements(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            match node:
                case nodes.Output(nodes=expressions):
                    self._texts(expressions)
                case nodes.For():
                    self._loop(node)
                case nodes.If(test=test, body=body, elif_=others, else_=rest):
                    self._condition(test)
                    self.statements([*body, *others, *rest])
                case nodes.Assign(target=target, node=value):
                    self._assign(target, value)
                case nodes.AssignBlock(target=nodes.Name(name=name), filter=None, body=body):
                    self.statements(body)
                    self._join_name(name, _Kind.TEXT)
                case nodes.ExprStmt(node=expression):
                    self._kind(expression)
                case nodes.Continue() | nodes.Break():
                    pass
                case _:
                    raise _Reads

    def _loop(self, node: nodes.For) -> None:
        kind = self._kind(node.iter)
        if node.recursive or kind not in (_Kind.CLEAN, _Kind.MESSAGES):
            raise _Reads
        self._join_name("loop", _Kind.NAMESPACE)
        if kind is _Kind.MESSAGES:
            if not isinstance(node.target, nodes.Name):
                raise _Reads
            for name in (node.target.name, "loop.previtem", "loop.nextitem"):
                self._join_name(name, _Kind.MESSAGE)
        if node.test is not None:
            self._condition(node.test)
        self.statements([*node.body, *node.else_])

    def _assign(self, target: nodes.Node, value: nodes.Node) -> None:
        match target, value:
            case nodes.Tuple(items=targets), nodes.Tuple(items=values) if len(targets) == len(
                values
            ):
                for one, its in zip(targets, values, strict=True):
                    self._assign(one, its)
            case nodes.Tuple(), _:
                self._clean([value])
            case nodes.Name(name=name), nodes.Call(node=nodes.Name(name="namespace"), args=[]):
                self._join_name(name, _Kind.NAMESPACE)
                for keyword in value.kwargs:
                    self._join_name(f"{name}.{keyword.key}", self._value(keyword.value))
            case nodes.Name(name=name), _:
                self._join_name(name, self._value(value))
            case nodes.NSRef(name=name, attr=attribute), _:
                self._join_name(f"{name}.{attribute}", self._value(value))
            case _:
                raise _Reads

    def _value(self, node: nodes.Node) -> _Kind:
        """Return the kind of what is assigned; another name of a namespace is not followed."""
        if (kind := self._kind(node)) is _Kind.NAMESPACE:
            raise _Reads
        return kind

    def _join_name(self, name: str, kind: _Kind) -> None:
        self.kinds[name] = _joined(self.kinds.get(name, _Kind.CLEAN), kind)

    def _kind(self, node: nodes.Node) -> _Kind:
        """Return what an expression may be."""
        match node:
            case nodes.Const() | nodes.TemplateData():
                return _Kind.CLEAN
            case nodes.Name(name=name):
                return self.kinds.get(name, _Kind.CLEAN)
            case nodes.Getattr(node=owner, attr=attribute):
                return self._attribute(owner, attribute)
            case nodes.Getitem(node=owner, arg=index):
                return self._item(owner, index)
            case nodes.Add(left=left, right=right):
                return self._sum(self._kind(left), self._kind(right))
            case nodes.Concat(nodes=parts):
                return self._texts(parts)
            case nodes.And(left=left, right=right) | nodes.Or(left=left, right=right):
                return _joined(self._kind(left), self._kind(right))
            case nodes.Not(node=negated):
                return self._condition(negated)
            case nodes.CondExpr(test=test, expr1=first, expr2=second):
                self._condition(test)
                other = _Kind.CLEAN if second is None else self._kind(second)
                return _joined(self._kind(first), other)
            case nodes.Filter():
                return self._filter(node)
            case nodes.Test():
                return self._test(node)
            case nodes.Compare():
                return self._compare(node)
            case nodes.Call(dyn_args=None, dyn_kwargs=None):
                return self._call(node)
            case nodes.BinExpr(left=left, right=right):
                return self._clean([left, right])
            case nodes.UnaryExpr(node=operand):
                return self._clean([operand])
            case nodes.List(items=items) | nodes.Tuple(items=items):
                return self._clean(items)
            case nodes.Dict(items=pairs):
                return self._clean([part for pair in pairs for part in (pair.key, pair.value)])
        raise _Reads

    def _condition(self, node: nodes.Node) -> _Kind:
        """Follow an expression of which only the truth counts: a text with contents is true."""
        match node:
            case nodes.And(left=left, right=right) | nodes.Or(left=left, right=right):
                self._condition(left)
                self._condition(right)
            case _:
                self._kind(node)
        return _Kind.CLEAN

    def _attribute(self, owner: nodes.Expr, name: str) -> _Kind:
        kind = self._kind(owner)
        if kind is _Kind.NAMESPACE and isinstance(owner, nodes.Name):
            return self.kinds.get(f"{owner.name}.{name}", _Kind.CLEAN)
        if kind is _Kind.MESSAGE and not hasattr(dict, name):
            return _Kind.TEXT if name == "content" else _Kind.CLEAN
        return _only_clean(kind)

    def _item(self, owner: nodes.Expr, index: nodes.Expr) -> _Kind:
        kind = self._kind(owner)
        if isinstance(index, nodes.Slice):
            self._clean([x for x in (index.start, index.stop, index.step) if x is not None])
            return kind if kind is _Kind.MESSAGES else _only_clean(kind)
        if kind is _Kind.MESSAGE and isinstance(index, nodes.Const):
            return self._attribute(owner, str(index.value))
        self._clean([index])
        return _Kind.MESSAGE if kind is _Kind.MESSAGES else _only_clean(kind)

    def _sum(self, left: _Kind, right: _Kind) -> _Kind:
        for kind in (_Kind.TEXT, _Kind.MESSAGES):
            if {left, right} <= {kind, _Kind.CLEAN}:
                return _joined(left, right)
        raise _Reads

    def _filter(self, node: nodes.Filter) -> _Kind:
        if node.node is None:
            raise _Reads
        kind = self._kind(node.node)
        given = self._arguments(node)
        match kind, node.name:
            case _Kind.TEXT, "trim" | "string" if not given:
                return kind
            case _Kind.MESSAGES, "length" | "count":
                return _Kind.CLEAN
            case _Kind.MESSAGES, "list":
                return kind
            case _Kind.MESSAGES, "first" | "last":
                return _Kind.MESSAGE
        return _only_clean(kind)

    def _test(self, node: nodes.Test) -> _Kind:
        kind = self._kind(node.node)
        self._arguments(node)
        return _Kind.CLEAN if node.name in _TYPE_TESTS else _only_clean(kind)

    def _compare(self, node: nodes.Compare) -> _Kind:
        kind = self._kind(node.expr)
        for operand in node.ops:
            other = self._kind(operand.expr)
            of_none = isinstance(operand.expr, nodes.Const) and operand.expr.value is None
            if operand.op in ("eq", "ne") and of_none:
                continue
            if operand.op in ("in", "notin") and other is _Kind.MESSAGE:  # its keys
                other = _Kind.CLEAN
            _only_clean(kind)
            _only_clean(other)
        return _Kind.CLEAN

    def _call(self, node: nodes.Call) -> _Kind:
        match node.node:
            case nodes.Name(name="raise_exception"):
                self._texts(node.args)
                return _Kind.CLEAN
            case nodes.Getattr(node=owner, attr=name):
                kind, given = self._kind(owner), self._arguments(node)
                if (kind, name, given) == (_Kind.TEXT, "strip", 0):
                    return kind
                if (
                    kind is _Kind.MESSAGE
                    and name == "get"
                    and isinstance(node.args[0], nodes.Const)
                ):
                    return self._attribute(owner, str(node.args[0].value))
                if kind is _Kind.NAMESPACE:
                    return _Kind.CLEAN
                return _only_clean(kind)
        self._arguments(node)
        return _only_clean(self._kind(node.node))

    def _arguments(self, node: Any) -> int:
        """Return the number of arguments, none of which may have a content in it."""
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _Reads
        given = [*node.args, *(keyword.value for keyword in node.kwargs)]
        self._clean(given)
        return len(given)

    def _texts(self, parts: Sequence[nodes.Node]) -> _Kind:
        """Return the kind of what prints these parts."""
        kinds = {self._kind(part) for part in parts}
        if not kinds <= {_Kind.CLEAN, _Kind.TEXT}:
            raise _Reads
        return _Kind.TEXT if _Kind.TEXT in kinds else _Kind.CLEAN

    def _clean(self, parts: Sequence[nodes.Node]) -> _Kind:
        for part in parts:
            _only_clean(self._kind(part))
        return _Kind.CLEAN


def _only_clean(kind: _Kind) -> _Kind:
    if kind is not _Kind.CLEAN:
        raise _Reads
    return kind


def _joined(one: _Kind, other: _Kind) -> _Kind:
    """Return the kind of what is one or the other."""
    if _Kind.CLEAN in (one, other):
        return other if one is _Kind.CLEAN else one
    if one is not other:
        raise _Reads
    return one
