"""Check a plugin's declarations: entry points, names, manifest and hooks."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterator

from ascend_run.plugin_api.manifest import Manifest
from ascend_run.registry.offers import OWN_DISTRIBUTION

from .subject import Subject

SUMMARY_LENGTH = 90
ATTENTION_HOOKS = {"ascend_attention_kernel", "ascend_attention"}


def loads(subject: Subject) -> Iterator[str]:
    """Check that it can be imported, and that its entry point, group and manifest match."""
    if subject.load_error is not None:
        yield subject.load_error


def names(subject: Subject) -> Iterator[str]:
    """Check that each name of the manifest has an entry point to this class."""
    offered = subject.facts.entry_points
    own = f"{subject.plugin.__module__}:{subject.plugin.__qualname__}"
    canonical = offered.get(subject.manifest.name, own)
    for name in (subject.manifest.name, *subject.manifest.aliases):
        if name not in offered:
            yield (
                f"the manifest has the name '{name}', which has no entry point; add: "
                f"{name} = {canonical}"
            )
        elif offered[name] != canonical:
            yield f"the entry point '{name}' refers to {offered[name]}, expected {canonical}"


def manifest(subject: Subject) -> Iterator[str]:
    """Check that fields which matter to users are explicit, and that the summary fits a table."""
    needed = ["numerics", "platforms"]
    if subject.facts.kind == "feature":
        needed.append("level")
    if subject.facts.distribution != OWN_DISTRIBUTION:
        needed.append("requires_api")
    written = _written_fields(subject.plugin)
    if written is not None:
        for field in needed:
            if field not in written:
                default = getattr(subject.manifest, field)
                yield f"'{field}' is not explicit in the Manifest; its default is {default!s}"
    summary = subject.manifest.summary
    if not summary.strip() or summary != summary.strip() or "\n" in summary:
        yield f"the summary must be one line without surrounding spaces, got {summary!r}"
    elif len(summary) > SUMMARY_LENGTH:
        yield f"the summary has {len(summary)} characters, at most {SUMMARY_LENGTH} fit in a table"
    elif summary.endswith("."):
        yield f"the summary must not end with a period, got {summary!r}"
    offered = subject.facts.entry_points
    needed = [other for other in subject.manifest.requires if isinstance(other, str)]
    for other in (*subject.manifest.after, *subject.manifest.conflicts, *needed):
        if other in (subject.manifest.name, *subject.manifest.aliases):
            yield f"the manifest orders, excludes or requires '{other}', which is the plugin itself"
        # Plugins that are not installed may be named; a name close to an installed one is a typo.
        elif other not in offered and (near := difflib.get_close_matches(other, offered, 1, 0.85)):
            yield f"the manifest names '{other}', which is not installed; did you mean '{near[0]}'?"


def hooks(subject: Subject) -> Iterator[str]:
    """Check that its hooks are hooks of the API, and that its manifest repeats no implied claim."""
    facts = subject.facts
    yield from facts.hook_problems
    if not facts.hooks:
        yield "it implements no hook; mark a method ascend_<noun> with @hookimpl"
    if ATTENTION_HOOKS & facts.hooks and subject.manifest.attention is None:
        yield (
            "it implements attention, but its manifest does not declare the features of that "
            "attention; add attention=AttentionFeatures(...)"
        )


def _written_fields(plugin: type) -> set[str] | None:
    """The keyword arguments of the class's Manifest in the source; None if they cannot be
    determined."""
    try:
        source = inspect.getsource(inspect.getmodule(plugin) or plugin)
    except (OSError, TypeError):
        return None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == plugin.__name__:
            for statement in node.body:
                targets = (
                    statement.targets
                    if isinstance(statement, ast.Assign)
                    else [statement.target]
                    if isinstance(statement, ast.AnnAssign)
                    else []
                )
                if "manifest" not in [ast.unparse(target) for target in targets]:
                    continue
                call = getattr(statement, "value", None)
                if isinstance(call, ast.Call):
                    made_by = ast.unparse(call.func).rpartition(".")[2]
                    given = [keyword.arg for keyword in call.keywords]
                    if made_by == Manifest.__name__ and None not in given:
                        return {name for name in given if name is not None}
    return None
