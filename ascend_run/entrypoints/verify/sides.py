"""The runs that answer a question: which are made, and which of them are compared. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from ascend_run.core.verify.thresholds import LOSS_SCALE
from ascend_run.entrypoints.planning import Prepared
from ascend_run.plugin_api import AscendRunError, Numerics

from . import layouts
from .building import EXACT, PRECISION, find_candidate, from_file, make_side
from .questions import Question, Side

_DROPOUT: Final = ("model.hidden_dropout", "model.attention_dropout")


@attrs.frozen(kw_only=True)
class OwnPrecision:
    """The candidate and a reference once more, in the precision that the run trains in."""

    name: str
    """``bf16`` or ``fp16``."""
    candidate: Side
    reference: Side


@attrs.frozen(kw_only=True)
class Sides:
    """The candidate and what it is compared with."""

    candidate: Side
    plain: Side
    """On one rank, with those plugins only that are another model."""
    same_layout: Side | None
    """The candidate's layout without the plugins under test, where that can run."""
    against: Side | None
    with_dropout: tuple[Side, Side] | None
    """The candidate and a reference that draws the same numbers, where the model has dropout; all
    other runs are made without, since what is dropped depends on the layout."""
    own_precision: OwnPrecision | None
    """Where the run does not train in float32, which all other runs are made in."""
    declared: Mapping[str, Numerics]
    notes: tuple[str, ...]


def sides_of(question: Question) -> Sides:
    """The runs that answer a question, all known to be able to start.

    Raises:
        AscendRunError: One that was asked for cannot.
    """
    file_enables, sizes = from_file(question)
    beside = tuple(dict.fromkeys((*file_enables, *question.beside)))
    beside = tuple(name for name in beside if name not in question.enable)
    other = None if question.against is None else layouts.with_dp(question.against)
    notes: list[str] = []

    def side(name: str, enable: tuple[str, ...], of: Mapping[str, int], model: str) -> Side:
        return make_side(question, name, enable, of, model, [sizes, other or {}])

    enabled = (*beside, *question.enable)
    model, dropping = find_candidate(question, enabled, sizes, side)
    prepared = dropping.prepare()
    numerics = _numerics(prepared, enabled)
    dropout = [key for key in _DROPOUT if prepared.config.model.get(key.partition(".")[2])]
    candidate = _without_dropout(dropping)
    models = tuple(name for name in enabled if numerics[name] is Numerics.MODEL)
    plain = _without_dropout(side("the plain model on one rank", models, {}, model))
    plain.prepare()
    same_layout: Side | None = None
    like_dropping = side(f"{plain.name}, with dropout", models, {}, model)
    if candidate.world_size > 1 and question.enable:
        without = tuple(dict.fromkeys((*beside, *models)))
        if without != enabled:
            like_dropping = side("the same layout without, with dropout", without, sizes, model)
            try:
                like_dropping.prepare()
                name = "the same layout without"
                same_layout = _without_dropout(attrs.evolve(like_dropping, name=name))
            except AscendRunError as error:
                notes.append(f"no run in this layout without the plugins: {_reason(error)}")
    against = None
    if other is not None:
        name = f"{layouts.shown(other)} without"
        features = tuple(dict.fromkeys((*beside, *models)))
        against = _without_dropout(side(name, features, other, model))
        against.prepare()
    own = _own_precision(question, candidate, same_layout or plain)
    if own is not None:
        notes.append(
            f"the run trains in {own.name}: compared in float64 and float32, where faults stand "
            f"above the rounding, and in {own.name} by how far it lies from those"
        )
    if models:
        notes.append(
            f"{', '.join(models)} changes the model by design; compared is the same model on one "
            "rank"
        )
    with_dropout = None
    if dropout and (same_layout is not None or candidate.world_size == 1):
        with_dropout = (dropping, like_dropping)
    elif dropout:
        notes.append("compared without dropout, as no other run drops the same in this layout")
    if question.file is None:
        notes.append(f"model: the built-in '{model}' with made-up batches; --config takes yours")
    references = (plain, same_layout, against)
    if not any(_differs(candidate, side) for side in references if side):
        notes.append("both runs are the same: this shows only that it repeats itself")
    declared = {name: numerics[name] for name in question.enable}
    return Sides(
        candidate=candidate,
        plain=plain,
        same_layout=same_layout,
        against=against,
        with_dropout=with_dropout,
        own_precision=own,
        declared=declared,
        notes=tuple(notes),
    )


def _without_dropout(side: Side) -> Side:
    return attrs.evolve(side, values={**side.values, **dict.fromkeys(_DROPOUT, 0.0)})


def _own_precision(question: Question, candidate: Side, reference: Side) -> OwnPrecision | None:
    def own(side: Side) -> Side:
        """As the file or a setting asks for it."""
        values = {key: value for key, value in side.values.items() if key != PRECISION}
        if PRECISION in question.config:
            values[PRECISION] = question.config[PRECISION]
        return attrs.evolve(side, values=values)

    name = own(candidate).prepare().config.train.precision
    if name == EXACT:
        return None
    # A scale that overflows would have the few steps skipped.
    more = {"optimizer.initial_loss_scale": LOSS_SCALE} if name == "fp16" else {}
    sides = [
        attrs.evolve(side, name=f"{side.name}, in {name}", values={**side.values, **more})
        for side in (own(candidate), own(reference))
    ]
    for side in sides:
        side.prepare()
    return OwnPrecision(name=name, candidate=sides[0], reference=sides[1])


def _numerics(prepared: Prepared, enabled: tuple[str, ...]) -> dict[str, Numerics]:
    known = {plugin.manifest.name: plugin.manifest for plugin in prepared.resolution.order}
    aliases = {alias: m for m in known.values() for alias in m.aliases}
    return {name: (known.get(name) or aliases[name]).numerics for name in enabled}


def _differs(one: Side, other: Side) -> bool:
    return attrs.evolve(one, name="") != attrs.evolve(other, name="")


def _reason(error: AscendRunError) -> str:
    return error.problems[0] if error.problems else error.headline
