"""Parse YAML to plain data with line numbers: no duplicate keys, aliases or custom tags.

PyYAML follows YAML 1.1, where ``no`` is false, ``1e-4`` a string and ``1:30`` a number. Here
scalars follow YAML 1.2's core schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

_NULL: Final = re.compile(r"~|null|Null|NULL|")
_BOOLEAN: Final = re.compile(r"true|True|TRUE|false|False|FALSE")
_WHOLE: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_NUMBER: Final = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    re.ASCII,
)
_OPENING: Final = (
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
)
_CLOSING: Final = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
_DEEPEST: Final = 32


class YamlProblem(Exception):
    """A syntax error with its location: ``line 3: ...``."""


def parse_yaml(text: str) -> tuple[object, dict[tuple[str, ...], int]]:
    """Return the document's data, and a map from key paths to lines, from 1.

    Raises:
        YamlProblem: The text is not YAML, or uses an unsupported feature.
    """
    try:
        _reject_unsupported(yaml.scan(text, Loader=yaml.SafeLoader))
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise YamlProblem(f"{_at(error.problem_mark)}{error.problem}") from None
    except yaml.YAMLError as error:
        raise YamlProblem(" ".join(str(error).split())) from None
    lines: dict[tuple[str, ...], int] = {}
    return ({} if root is None else _data(root, (), lines)), lines


def _reject_unsupported(tokens: Iterator[Any]) -> None:
    """Reject unsupported tokens at the first one; scanning slows with nesting depth."""
    depth = 0
    for token in tokens:
        if isinstance(token, yaml.AnchorToken | yaml.AliasToken):
            raise YamlProblem(f"{_at(token.start_mark)}anchors and aliases are not supported")
        if isinstance(token, yaml.TagToken):
            raise YamlProblem(f"{_at(token.start_mark)}tags are not supported")
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > _DEEPEST:
            raise YamlProblem(f"{_at(token.start_mark)}nested too deeply")


def _data(node: object, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return dict(_entries(node, path, lines))
    if isinstance(node, yaml.SequenceNode):
        return [_data(member, (*path, "[]"), {}) for member in node.value]
    return _scalar(node)


def _entries(
    node: Any, path: tuple[str, ...], lines: dict[tuple[str, ...], int]
) -> Iterator[tuple[str, object]]:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise YamlProblem(f"line {line}: a key must be a word")
        key = key_node.value
        if key in seen:
            raise YamlProblem(f"line {line}: {key!r} is given twice, first on line {seen[key]}")
        seen[key] = line
        lines[(*path, key)] = line
        yield key, _data(value_node, (*path, key), lines)


def _scalar(node: Any) -> Any:
    text = node.value
    if node.style is not None:  # quoted, or a block scalar
        return text
    if _NULL.fullmatch(text):
        return None
    if _BOOLEAN.fullmatch(text):
        return text.lower() == "true"
    try:
        if _WHOLE.fullmatch(text):
            return int(text, 0) if text[1:2] in ("o", "x") else int(text)
        if _NUMBER.fullmatch(text):
            return float(text.replace(".inf", "inf").replace(".nan", "nan").lower())
    except ValueError:  # more digits than Python converts
        raise YamlProblem(f"{_at(node.start_mark)}a number with too many digits") from None
    return text


def _at(mark: Any) -> str:
    return f"line {mark.line + 1}: " if mark is not None else ""
