"""Check that a plugin's options are frozen, documented and validated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from ascend_run.testing.pool import PoolError

from .check import DoesNotApply
from .numbers import require_device
from .resuming import run_or_reject
from .scenarios import choice_of, scenarios
from .subject import Subject

_SEVERAL: Final = re.compile(r"tuple|list|dict|Mapping|Sequence|set\[")
_PROBES: Final[Mapping[str, tuple[object, ...]]] = {
    "int": (-(2**40), -1, 0, 2**40),
    "float": (-1e30, -1.0, 0.0, 1e30),
}
_UNBOUNDED: Final = re.compile(r"\bunbounded\b|\bno bound\b|\bany (integer|number|value)\b", re.I)
_NO_CHOICE: Final = "no-such-choice"


def documented(subject: Subject) -> Iterator[str]:
    """Check that options are a frozen attrs class whose fields have types, docs and defaults."""
    options = _options(subject)
    for option in subject.facts.options:
        if not option.help.strip():
            yield f"{option.name} has no documentation; write a docstring below the field"
    for field in attrs.fields(options):
        if field.type is None:
            yield f"{field.name} has no type; annotate it"
        if field.default is attrs.NOTHING:
            yield f"{field.name} has no default; a plugin must work without any options set"
        elif isinstance(field.default, list | dict | set):
            yield (
                f"{field.name} has the mutable default {field.default!r}, which runs share; use a "
                "tuple, or attrs.field(factory=...)"
            )
    try:
        first, second = options(), options()
    except Exception as error:
        yield f"the defaults cannot be built: {type(error).__name__}: {error}"
        return
    if not _is_frozen(first):
        yield f"{options.__name__} can be changed after it is made; use attrs.frozen"
    if first != second:
        yield "two instances of the defaults are not equal; use the __eq__ of attrs.frozen"


def bounded(subject: Subject) -> Iterator[str]:
    """Check that numbers have bounds, and that error messages name field, value and bound."""
    options = _options(subject)
    help_of = {option.name: option.help for option in subject.facts.options}
    types = {option.name: option.type for option in subject.facts.options}
    for field in attrs.fields(options):
        type_name = types.get(field.name, "")
        probes = _probes(type_name)
        refused = [value for value in probes if _refusal(options, field.name, value) is not None]
        if probes and probes[0] not in refused and not _UNBOUNDED.search(help_of[field.name]):
            least = f"any number from {probes[0]:g} to {probes[-1]:g}"
            least = f"{probes[0]:g} and other numbers below {refused[0]:g}" if refused else least
            yield (
                f"{field.name} accepts {least}; give it a validator, or document why it is "
                "'unbounded'"
            )
        taken = [value for value in probes[1:3] if value not in refused]
        if taken:
            yield from _crashes(subject, field.name, taken[0])
        if not probes and field.validator is not None and _is_text(type_name):
            choice = [_NO_CHOICE] if _SEVERAL.search(type_name) else _NO_CHOICE
            refused = [choice] if _refusal(options, field.name, choice) else []
        if refused:
            yield from _message_problems(subject, field.name, refused[0])


def _options(subject: Subject) -> type[Any]:
    options = subject.options_class
    if options is None:
        raise DoesNotApply("it has no options")
    return options


def _is_frozen(instance: Any) -> bool:
    for field in attrs.fields(type(instance)):
        try:
            setattr(instance, field.name, getattr(instance, field.name))
        except attrs.exceptions.FrozenError:
            return True
        return False
    return True


def _is_text(type_name: str) -> bool:
    return bool(re.search(r"\bstr\b", type_name)) and not _SEVERAL.search(type_name)


def _probes(type_name: str) -> tuple[object, ...]:
    """Values to try for a field that is a single number: near zero and far from it."""
    if _SEVERAL.search(type_name):
        return ()
    return next((v for n, v in _PROBES.items() if re.search(rf"\b{n}\b", type_name)), ())


def _refusal(options: type[Any], field: str, value: object) -> Exception | None:
    try:
        options(**{field: value})
    except Exception as error:
        return error
    return None


def _crashes(subject: Subject, field: str, value: Any) -> Iterator[str]:
    """A message if a run with a value that the class accepts neither works nor is rejected."""
    key = f"plugins.{subject.manifest.name}.{field}"
    try:
        alone = [scenario for scenario in scenarios(subject) if scenario.world_size == 1]
        if not alone:
            return
        require_device(subject)
        trial = attrs.evolve(alone[0].chosen, config={**alone[0].chosen.config, key: value})
        if not subject.means.examine(trial, 1).problems:
            subject.means.job(run_or_reject, 1, trial)
    except DoesNotApply:
        return  # no run can use it, which another check reports
    except PoolError as error:
        yield f"{key}={value} is accepted, but a run with it fails: {error.kind}: {error.message}"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        yield f"{key}={value} is accepted, but a plan with it fails: {reason}"


def _message_problems(subject: Subject, field: str, value: Any) -> Iterator[str]:
    """Problems of the error message for a rejected value."""
    key = f"plugins.{subject.manifest.name}.{field}"
    chosen = choice_of(subject)
    trial = attrs.evolve(chosen, config={**chosen.config, key: value})
    problems = [text for text in subject.means.examine(trial, 1).problems if field in text]
    if not problems:
        yield f"{key}={value} is rejected by the class, but the error of a run does not name it"
        return
    message = problems[0]
    value = value[0] if isinstance(value, list) else value
    if str(value) not in message and repr(value) not in message:
        yield f"the error message for {key}={value} does not name the value: {message}"
    rest = message.replace(str(value), "").replace(field, "").replace(subject.manifest.name, "")
    if not re.search(r"\d|'[^']+'", rest):
        yield f"the error message for {key}={value} does not name valid values: {message}"
