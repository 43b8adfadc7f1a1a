"""Objects of the sources, read with griffe, as Markdown that also reads well in a terminal."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import griffe

WIDTH: Final = 110
_SECTION: Final = re.compile(r"(Args|Returns|Raises|Yields):\n((?:    .*\n|\n)*)")
_ENTRY: Final = re.compile(r"[\w*][\w., *]*: ")


class Sources:
    """Modules of the package, parsed without importing them.

    Args:
        root: Folder of the package's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @functools.cache  # noqa: B019  # lives as long as the script
    def module(self, name: str) -> griffe.Module:
        """Parse one module."""
        path = self._root / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return parsed(name, file, file.read_text(encoding="utf-8"))

    def find(self, module: str, name: str) -> griffe.Object:
        """Return an object that a module defines."""
        found = self.module(module).members[name]
        assert isinstance(found, griffe.Object)
        return found

    def resolve(self, module: str, name: str) -> griffe.Object:
        """Return the object that a name of a module stands for, wherever it is defined."""
        found = self.module(module).members.get(name)
        if isinstance(found, griffe.Object):
            return found
        if isinstance(found, griffe.Alias):
            return self.resolve(*found.target_path.rsplit(".", 1))
        for member in self.module(module).members.values():
            starred = member.wildcard if isinstance(member, griffe.Alias) else None
            if starred is not None and name in self.module(starred).members:
                return self.resolve(starred, name)
        # A name that is imported when it is used.
        value = getattr(importlib.import_module(module), name)
        return self.resolve(value.__module__, name)


def parsed(name: str, file: Path, text: str) -> griffe.Module:
    """Parse a module, with the lines that field comments are read from."""
    lines = griffe.LinesCollection()
    lines[file] = text.splitlines()
    return griffe.visit(name, file, text, lines_collection=lines)


def described(found: griffe.Object) -> str:
    """Return signature, docstring, fields and methods of an object."""
    lines = ["\n"]
    if isinstance(found, griffe.Function):
        lines.append(f"```\n{signature(found)}\n```\n\n")
    elif isinstance(found, griffe.Class):
        bases = ", ".join(str(base) for base in found.bases)
        marks = "".join(f"@{mark.value}\n" for mark in found.decorators)
        head = f"{marks}class {found.name}{f'({bases})' if bases else ''}"
        lines.append(f"```\n{head}\n```\n\n")
    elif isinstance(found, griffe.Attribute):
        code = wrapped(textwrap.shorten(_assignment(found), 200), indent="    ")
        lines.append(f"```\n{code}\n```\n\n")
    lines.append(prose(found.docstring.value if found.docstring else ""))
    if isinstance(found, griffe.Class):
        lines += _members(found)
    return "".join(lines)


def signature(function: griffe.Function) -> str:
    """Return the signature of a function, one argument a line if it is long."""
    arguments = list(_arguments(function))
    returns = f" -> {function.returns}" if function.returns is not None else ""
    short = f"{function.name}({', '.join(arguments)}){returns}"
    if len(short) <= 100:
        return short
    return f"{function.name}(\n    " + ",\n    ".join(arguments) + f",\n){returns}"


def prose(docstring: str) -> str:
    """Return a docstring as Markdown: sections as lists, names in backticks."""
    text = inspect.cleandoc(docstring).replace("``", "`") + "\n"
    text = text.replace("::\n", ":\n")
    text = _SECTION.sub(lambda match: f"{match[1]}:\n\n{_entries(match[2])}", text)
    return text if text.strip() else ""


def _entries(body: str) -> str:
    """Return the entries of a section as a list; of a text without entries, one item."""
    lines = textwrap.dedent(body).strip("\n").splitlines()
    has_entries = _ENTRY.match(lines[0]) is not None
    made: list[str] = []
    for index, line in enumerate(lines):
        begins = not line.startswith(" ") if has_entries else index == 0
        made.append(f"- {line}" if begins and line else f"  {line.strip()}")
    return "\n".join(line.rstrip() for line in made) + "\n\n"


def _members(found: griffe.Class) -> Iterator[str]:
    """Yield the fields of a class, and its public methods."""
    shown = public_members(found)
    yield "\n"
    yield from (_field(member) for member in shown if isinstance(member, griffe.Attribute))
    for member in shown:
        if isinstance(member, griffe.Function):
            doc = prose(member.docstring.value if member.docstring else "")
            yield f"\n#### `{found.name}.{member.name}`\n\n"
            yield f"```\n{signature(member)}\n```\n\n{doc}"


def public_members(found: griffe.Class) -> list[griffe.Object | griffe.Alias]:
    """Return the fields and methods of a class that its page shows."""
    return [
        member
        for name, member in found.members.items()
        if (not name.startswith("_") or name == "__call__") and not _is_untold(member)
    ]


def _is_untold(member: griffe.Object | griffe.Alias) -> bool:
    """Whether a member is an attribute without type and documentation, and not of an enum."""
    parent = member.parent
    is_enum = isinstance(parent, griffe.Class) and any("Enum" in str(b) for b in parent.bases)
    return (
        isinstance(member, griffe.Attribute)
        and member.annotation is None
        and not documentation(member)
        and "instance-attribute" in member.labels
        and not is_enum
    )


def documentation(member: griffe.Attribute) -> str:
    """Return the text of a field: its docstring, or the comment ``#:`` that ends its line."""
    if member.docstring:
        return member.docstring.value
    _, _, comment = (member.lines or [""])[-1].partition("  #: ")
    return comment


def _field(member: griffe.Attribute) -> str:
    doc = " ".join(prose(documentation(member)).split())
    text = f"- `{_assignment(member)}`{f': {doc}' if doc else ''}"
    return wrapped(text, indent="  ") + "\n"


def wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines of the pages' width."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _assignment(member: griffe.Attribute) -> str:
    """Return name, type and default as they are written."""
    kind = f": {member.annotation}" if member.annotation is not None else ""
    value = _default(member.value)
    return f"{member.name}{kind}{f' = {value}' if value else ''}"


def _default(value: Any) -> str:
    """Return the default of a field; empty if there is none."""
    text = "" if value is None else str(value)
    if not text.startswith("attrs.field("):
        return text
    inside = re.search(r"\b(default|factory)=((?:[^,()]|\([^()]*\))+)", text)
    if inside is None:
        return ""
    return inside[2] if inside[1] == "default" else f"{inside[2]}()"


def _arguments(function: griffe.Function) -> Iterator[str]:
    starred = False
    for parameter in function.parameters:
        name, kind = parameter.name, parameter.kind
        if name in ("self", "cls"):
            continue
        if kind is griffe.ParameterKind.keyword_only and not starred:
            starred = True
            yield "*"
        star = {
            griffe.ParameterKind.var_positional: "*",
            griffe.ParameterKind.var_keyword: "**",
        }.get(kind, "")
        starred = starred or star == "*"
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = f" = {parameter.default}" if parameter.default is not None and not star else ""
        yield f"{star}{name}{annotation}{default}"
