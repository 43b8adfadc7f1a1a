"""Fields of the installed Megatron's config classes, read from its source.

Importing megatron.core takes seconds and imports torch; parsing two files takes a few hundredths of
a second. Reads name, annotation, default and docstring. Fields that only multi-latent attention has
(MLATransformerConfig) are included.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import operator
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs

from ascend_run.plugin_api.errors import ConfigError

_PARALLEL_FILE: Final = Path("core/model_parallel_config.py")
_MODEL_FILE: Final = Path("core/transformer/transformer_config.py")
_NULLABLE: Final = frozenset({"q_lora_rank"})
"""Fields for which Megatron's code accepts None although the annotation does not."""
_OURS: Final = frozenset({"rotary_base", "rotary_percent"})
"""MLATransformerConfig fields that are keys of our own, for every model."""
_ATOMS: Final[Mapping[str, object]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "None": type(None),
    "list": list[Any],
    "List": list[Any],
    "dict": dict[str, Any],
    "Dict": dict[str, Any],
}


@attrs.frozen(kw_only=True)
class MegatronField:
    """One field of TransformerConfig or MLATransformerConfig."""

    name: str
    section: str  #: ``parallel`` if inherited from ModelParallelConfig, else ``model``.
    annotation: str  #: Annotation in Megatron's source.
    type: Any  #: The part of the annotation that TOML can represent; None if there is none.
    default: Any = None
    doc: str = ""
    latent: bool = False
    """True for a field of MLATransformerConfig only, unused without multi-latent attention."""


def find_megatron() -> Path:
    """Return the ``megatron`` folder that contains ``core``, without importing it.

    Raises:
        ConfigError: megatron-core is not installed.
    """
    spec = importlib.util.find_spec("megatron")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / _MODEL_FILE).is_file():
            return Path(folder)
    raise ConfigError("megatron-core is not installed; install it: pip install megatron-core")


@functools.cache
def megatron_fields() -> Mapping[str, MegatronField]:
    """Return every public field of TransformerConfig by name, inherited ones first.

    Fields that MLATransformerConfig adds come last.

    Raises:
        ConfigError: megatron-core is not installed, or its source cannot be parsed.
    """
    folder = find_megatron()
    parallel = _class_fields(folder / _PARALLEL_FILE, "ModelParallelConfig", "parallel")
    model = _class_fields(folder / _MODEL_FILE, "TransformerConfig", "model")
    for name in parallel.keys() & model.keys():  # redeclared: new default, inherited section
        parallel[name] = attrs.evolve(model.pop(name), section="parallel")
    latent = {
        name: attrs.evolve(field, latent=True)
        for name, field in _class_fields(
            folder / _MODEL_FILE, "MLATransformerConfig", "model"
        ).items()
        if name not in parallel and name not in model and name not in _OURS
    }
    return MappingProxyType(parallel | model | latent)


def _class_fields(path: Path, class_name: str, section: str) -> dict[str, MegatronField]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read Megatron's fields from {path}: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return _body_fields(node.body, section)
    raise ConfigError(f"{path} has no class {class_name}; this megatron-core is not supported")


def _body_fields(body: list[ast.stmt], section: str) -> dict[str, MegatronField]:
    fields: dict[str, MegatronField] = {}
    for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if name.startswith("_"):
            continue
        known, default = _default(statement.value)
        held: Any = _holdable(statement.annotation) if known else None
        fields[name] = MegatronField(
            name=name,
            section=section,
            annotation=ast.unparse(statement.annotation),
            type=held | None if name in _NULLABLE else held,
            default=default,
            doc=_text(following),
        )
    return fields


def _text(statement: ast.stmt) -> str:
    """Return the docstring of a field, on one line."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return ""


def _default(node: ast.expr | None) -> tuple[bool, Any]:
    """Return whether a field's default is plain data, and its value."""
    if node is None:
        return True, None
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "dataclasses.field"):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "default_factory" in given:
            factory = {"list": list, "dict": dict}.get(ast.unparse(given["default_factory"]))
            return (True, factory()) if factory else (False, None)
        return _default(given.get("default"))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        (left_known, left), (right_known, right) = _default(node.left), _default(node.right)
        known = left_known and right_known
        return (True, left * right) if known else (False, None)
    try:
        return True, ast.literal_eval(node)
    except ValueError:
        return False, None


def _holdable(node: ast.expr) -> Any:
    """Return the part of an annotation that TOML can represent, or None.

    A union keeps its representable members; a union of only None yields None.
    """
    if isinstance(node, ast.Constant):
        return type(None) if node.value is None else None
    if isinstance(node, ast.Name):
        return _ATOMS.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_holdable(node.left), _holdable(node.right)])
    if not isinstance(node, ast.Subscript):
        return None
    name = ast.unparse(node.value).rpartition(".")[2]
    members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Literal":
        return Literal[tuple(ast.literal_eval(member) for member in members)]
    parts = [_holdable(member) for member in members]
    if name == "Optional":
        return _union([parts[0], type(None)])
    if name == "Union":
        return _union(parts)
    if any(part is None for part in parts):
        return None
    if name in ("list", "List"):
        return list[parts[0]]  # type: ignore[valid-type]
    if name in ("tuple", "Tuple"):
        return tuple[tuple(parts)]  # type: ignore[misc]
    if name in ("dict", "Dict"):
        return dict[parts[0], parts[1]]  # type: ignore[valid-type]
    return None


def _union(parts: list[Any]) -> Any:
    held = [part for part in parts if part is not None]
    if not held or held == [type(None)]:
        return None
    return functools.reduce(operator.or_, held)
