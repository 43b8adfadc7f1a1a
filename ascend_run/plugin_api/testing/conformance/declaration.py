"""What a plugin says of itself: that it can be had, by which names, and with what written out."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterator

from ascend_run.plugin_api.hook_points import hook_points
from ascend_run.plugin_api.manifest import Claim, Manifest

from .subject import Subject

SUMMARY_LENGTH = 90
_ATTENTION_HOOKS = {"ascend_attention_kernel", "ascend_attention"}
_OF_A_TASK = {Claim.DATASET}
"""A task that brings samples of its own owns their storage too, without the hook."""


def loads(subject: Subject) -> Iterator[str]:
    """It can be imported, and its entry point, group and manifest agree."""
    if subject.load_error is not None:
        yield subject.load_error


def names(subject: Subject) -> Iterator[str]:
    """Each name of the manifest has an entry point to this class."""
    offered = subject.facts.entry_points
    own = f"{subject.plugin.__module__}:{subject.plugin.__qualname__}"
    canonical = offered.get(subject.manifest.name, own)
    for name in (subject.manifest.name, *subject.manifest.aliases):
        if name not in offered:
            yield (
                f"the manifest has the name '{name}', which no entry point has; add: "
                f"{name} = {canonical}"
            )
        elif offered[name] != canonical:
            yield f"the entry point '{name}' leads to {offered[name]}, expected {canonical}"


def manifest(subject: Subject) -> Iterator[str]:
    """What a user decides by is written out, and the summary is a line of a table."""
    needed = ["numerics", "platforms"]
    if subject.facts.kind == "feature":
        needed.append("level")
    written = _written_fields(subject.plugin)
    if written is not None:
        for field in needed:
            if field not in written:
                default = getattr(subject.manifest, field)
                yield f"'{field}' is not written out in the Manifest; its default is {default!s}"
    summary = subject.manifest.summary
    if not summary.strip() or summary != summary.strip() or "\n" in summary:
        yield f"the summary must be one line without space around it, got {summary!r}"
    elif len(summary) > SUMMARY_LENGTH:
        yield f"the summary has {len(summary)} characters, at most {SUMMARY_LENGTH} fit in a table"
    elif summary.endswith("."):
        yield f"the summary is no sentence and needs no stop, got {summary!r}"
    offered = subject.facts.entry_points
    needed = [other for other in subject.manifest.requires if isinstance(other, str)]
    for other in (*subject.manifest.after, *subject.manifest.conflicts, *needed):
        if other in (subject.manifest.name, *subject.manifest.aliases):
            yield f"the manifest orders, excludes or requires '{other}', which is the plugin itself"
        # Another's that is not installed may be named; what is nearly one that is, is misspelt.
        elif other not in offered and (near := difflib.get_close_matches(other, offered, 1, 0.85)):
            yield f"the manifest names '{other}', which is not installed; did you mean '{near[0]}'?"


def hooks(subject: Subject) -> Iterator[str]:
    """Its implementations are of the API, and its claims are those of its hooks."""
    facts, declared = subject.facts, subject.manifest
    yield from facts.hook_problems
    if not facts.hooks:
        yield "it implements no hook; mark a method ascend_<noun> with @hookimpl"
    hooks_of: dict[Claim, list[str]] = {}
    for point in hook_points().values():
        if point.claim is not None:
            hooks_of.setdefault(point.claim, []).append(point.name)
    for claim in declared.claims:
        answering = hooks_of.get(claim)
        if answering is None or facts.hooks.intersection(answering):
            continue  # a seam without a hook of its own, or one that it answers
        if facts.kind == "task" and claim in _OF_A_TASK:
            continue
        yield (
            f"it claims '{claim}' and does not implement {' or '.join(answering)}; leave the claim "
            "out, so that another plugin can have it"
        )
    if _ATTENTION_HOOKS & facts.hooks and declared.attention is None:
        yield (
            "it answers for attention, and its manifest does not say what that attention can do; "
            "add attention=AttentionFeatures(...)"
        )


def _written_fields(plugin: type) -> set[str] | None:
    """The arguments that the class's Manifest is written with; None where it is made otherwise, or
    its source cannot be read."""
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
