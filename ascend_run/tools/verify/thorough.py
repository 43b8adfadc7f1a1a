"""Verify more layouts than the one that is asked for. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from ascend_run.plugin_api.errors import AscendRunError
from ascend_run.testing.models import MODELS
from ascend_run.tools.verify.compare.verdict import Outcome, Verdict

from . import layouts
from .building import PRECISION, QUERY_GROUPS, from_file, has_latent_attention
from .questions import Question
from .sides import Sides, sides_of
from .verifier import Verifier

_SIZES: Final = (3, 4)
_SKIPPING: Final = "fp16"
"""The precision in which steps may be skipped."""
_AXES: Final = ("tp", "pp", "cp", "ep", "expt_tp", "dp")
_GOES_WITH: Final = {"tp": "sp", "pp": "vpp"}
_SHARED_BY_THREE: Final = {
    "model.hidden_size": 48,
    "model.num_attention_heads": 12,
    QUERY_GROUPS: 3,
    "data.seq_length": 24,
}
_FOR_THREE: Final[Mapping[str, Mapping[str, object]]] = {
    "tp": _SHARED_BY_THREE,
    "cp": _SHARED_BY_THREE,
    "ep": {"model.num_moe_experts": 6},
}
"""Axis -> settings with which three ranks can share a built-in model."""


@attrs.frozen
class _Variant:
    """One of the questions."""

    question: Question
    name: str


def note_on(question: Question) -> str | None:
    """Return what a layout with at most two ranks on each axis cannot show; None if it has more, or
    only one rank."""
    sizes = from_file(question)[1]
    if max((sizes.get(axis, 1) for axis in _AXES), default=1) != 2:
        return None
    return (
        "two ranks on an axis are each other's next and previous one: errors in the order of ranks "
        "show with three or four only (--thorough)"
    )


def verify_thoroughly(verify: Verifier, question: Question) -> Verdict:
    """Verify a question, and the same in fp16, and for layouts of three and four ranks on each of
    its axes; of the built-in models both the dense one and the one with experts.

    Returns:
        The first verdict that diverges, else the first that is not good, else the question's. Its
        notes list everything that was verified, and what cannot run, with the reason.

    Raises:
        AscendRunError: The question itself cannot be verified, or a run failed.
    """
    sides = sides_of(question)
    possible, notes = [_Variant(question, sides.candidate.name)], []
    for variant in _variants(question, sides):
        if reason := _refusal(variant.question):
            notes.append(f"not verified: {variant.name}: {reason}")
        else:
            possible.append(variant)
    # All of them before any run with the plugins, after which ranks would be started again.
    verify.run_references([variant.question for variant in possible])
    verdicts = [verify(variant.question) for variant in possible]
    found = [
        f"verified: {variant.name}: {verdict.sentence()}"
        for variant, verdict in zip(possible, verdicts, strict=True)
    ]
    wrong = [verdict for verdict in verdicts if verdict.outcome is Outcome.DIVERGES]
    shown = [*wrong, *(verdict for verdict in verdicts if not verdict.good), verdicts[0]][0]
    return attrs.evolve(shown, notes=(*shown.notes, *found, *notes))


def _variants(question: Question, sides: Sides) -> Iterator[_Variant]:
    """Yield the further questions."""
    given = from_file(question)[1] if question.layout is None else dict(question.layout)
    models = _models(question, sides)
    for model in models[1:]:
        yield _variant(question, given, model)
    if sides.training_precision is None or sides.training_precision.name != _SKIPPING:
        name = f"{sides.candidate.name}, {_SKIPPING}"
        config = {**question.config, PRECISION: _SKIPPING}
        yield _Variant(attrs.evolve(question, config=config), name)
    for axis in _AXES:
        beside = _GOES_WITH.get(axis, "")
        for size in _SIZES if given.get(axis, 1) > 1 else ():
            layout = {axis: size, **({beside: given[beside]} if beside in given else {})}
            for model in models if layout != given else ():
                settings = _FOR_THREE.get(axis, {}) if size == 3 and question.file is None else {}
                yield _variant(question, layout, model, settings)


def _models(question: Question, sides: Sides) -> list[str | None]:
    """Return the built-in models to verify, the question's own first; only None for a file."""
    if question.file is not None or question.model is not None:
        return [question.model]
    family = sides.candidate.base["model.family"]
    first = next(name for name, model in MODELS.items() if model["model.family"] == family)
    return [first, *(name for name in MODELS if name != first)]


def _variant(
    question: Question,
    layout: Mapping[str, int],
    model: str | None,
    settings: Mapping[str, Any] | None = None,
) -> _Variant:
    given = {word.partition("=")[0].strip() for word in question.overrides}
    if has_latent_attention(question):
        given.add(QUERY_GROUPS)  # each head has its own key
    fitting = {key: value for key, value in (settings or {}).items() if key not in given}
    name = f"{', '.join(question.enable) or 'no plugin'} on {layouts.shown(layout)}"
    return _Variant(
        attrs.evolve(question, layout=layout, model=model, config={**fitting, **question.config}),
        name if model is None else f"{name}, {model}",
    )


def _refusal(question: Question) -> str | None:
    """Return why a question cannot be verified; None if it can."""
    try:
        candidate = sides_of(question).candidate
    except AscendRunError as error:
        return error.problems[0] if error.problems else error.headline
    idle = candidate.prepare().idle
    names = [name for name in question.enable if name in idle]
    return f"{names[0]} is idle where {idle[names[0]]}" if names else None
