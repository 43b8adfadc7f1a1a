"""Choose the runs to execute and to compare for a question. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.prepare.prepare import PreparedRun
from ascend_run.tools.verify.compare.thresholds import LOSS_SCALE

from . import layouts
from .building import EXACT, PRECISION, find_candidate, from_file, make_side, names_family
from .dropout import has_dropout, has_noise, with_dropout, without_dropout
from .left_out import LeftOut, MakeSide, is_same_run, left_out
from .oracle import what_the_oracle_lacks
from .questions import Question, Side
from .small_settings import small_settings


@attrs.frozen(kw_only=True)
class TrainingPrecision:
    """The candidate and a reference in the precision that the run trains in."""

    name: str
    """``bf16`` or ``fp16``."""
    candidate: Side
    reference: Side


@attrs.frozen(kw_only=True)
class Sides:
    """The candidate and the runs that it is compared with."""

    candidate: Side
    plain: Side
    """On one rank, with only those plugins that change the model by design."""
    same_layout: Side | None
    """The candidate's layout without the plugins to verify; None if it cannot run."""
    against: Side | None
    """The layout of ``--against``, without the plugins."""
    with_dropout: tuple[Side, Side] | None
    """The candidate and a reference that draws the same dropout masks, if the model has dropout.
    All other runs are without dropout, since masks depend on the layout."""
    masks: Side | None
    """The candidate with dropout, to record its masks only; None if it cannot have dropout."""
    training_precision: TrainingPrecision | None
    """Runs in bf16 or fp16, if the run trains in it; all other runs are in float32."""
    resumable: Side | None
    """The candidate as it trains, to be stopped and resumed; None if that is not asked for."""
    declared: Mapping[str, Numerics]
    unknown: tuple[str, ...]
    """What the oracle has no formula for; if nothing, the plain run is compared with it."""
    has_second_oracle: bool
    """Whether the model's family is compared with transformers: it is the user's choice."""
    left_out: tuple[LeftOut, ...]
    """Every plugin under test, with the runs that show whether it acts."""
    notes: tuple[str, ...]


def sides_of(question: Question) -> Sides:
    """Return the runs to compare for a question. All of them are known to be able to start.

    Raises:
        AscendRunError: A requested run cannot start.
    """
    file_enables, sizes = from_file(question)
    beside = tuple(dict.fromkeys((*file_enables, *question.beside)))
    beside = tuple(name for name in beside if name not in question.enable)
    other = {} if question.against is None else layouts.with_dp(question.against)

    def side(name: str, enable: tuple[str, ...], of: Mapping[str, int], model: str) -> Side:
        return make_side(question, name, enable, of, model, [sizes, other])

    enabled = (*beside, *question.enable)
    model, dropping = find_candidate(question, enabled, sizes, side)
    prepared = dropping.prepare()
    plugins = _plugins(prepared, enabled)
    numerics = {name: plugin.manifest.numerics for name, plugin in plugins.items()}
    models = tuple(name for name in enabled if numerics[name] is Numerics.MODEL)
    dropout = has_dropout(dropping)
    undrawn = without_dropout(dropping, one_layout=not other)
    candidate = undrawn(dropping)
    plain = undrawn(side("the plain model on one rank", models, {}, model))
    plain = attrs.evolve(plain, by_differences=True)
    unknown = what_the_oracle_lacks(plain.prepare())
    without = tuple(dict.fromkeys((*beside, *models)))
    same_layout, refused = None, ""
    like_dropping = side(f"{plain.name}, with dropout", models, {}, model)
    if candidate.world_size > 1 and question.enable and without != enabled:
        like_dropping = side("the same layout without, with dropout", without, sizes, model)
        same_layout, refused = _same_layout(like_dropping, undrawn)
    against = None
    if other:
        against = undrawn(side(f"{layouts.shown(other)} without", without, other, model))
        against.prepare()
    can_drop = dropout and (same_layout is not None or candidate.world_size == 1)
    sides = Sides(
        candidate=candidate,
        plain=attrs.evolve(plain, keeps_samples=not unknown),
        same_layout=same_layout,
        against=against,
        with_dropout=_pair_with_dropout(dropping, like_dropping) if can_drop else None,
        training_precision=_training_precision(question, candidate, same_layout or plain),
        masks=_masks(question, dropping),
        resumable=_resumable(question, dropping),
        declared={name: numerics[name] for name in question.enable},
        unknown=unknown,
        has_second_oracle=not unknown and names_family(question),
        left_out=(),
        notes=(),
    )
    built_in = model if question.file is None else None
    notes = _notes(sides, dropping, refused, models, built_in=built_in)

    def without_one(name: str, enable: tuple[str, ...]) -> Side:
        return undrawn(side(name, enable, sizes, model))

    sides = attrs.evolve(sides, notes=tuple(notes))
    return _with_left_out(sides, question, plugins, prepared.idle, without_one)


def _pair_with_dropout(dropping: Side, like_dropping: Side) -> tuple[Side, Side]:
    """The candidate and its reference, both with dropout."""
    name = f"{dropping.name}, with dropout"
    return attrs.evolve(dropping, name=name, saves=False), attrs.evolve(like_dropping, saves=False)


def _with_left_out(
    sides: Sides,
    question: Question,
    plugins: Mapping[str, Any],
    idle: Mapping[str, str],
    make: MakeSide,
) -> Sides:
    """Add the runs without each plugin under test, and notes on the settings chosen for them.

    Args:
        plugins: Name -> class of every enabled feature.
    """
    settings = {name: small_settings(question, plugins[name].manifest) for name in question.enable}
    found = left_out(
        question.enable,
        plugins,
        idle,
        sides.candidate,
        make,
        [side for side in (sides.plain, sides.same_layout, sides.against) if side],
        {name: chosen.not_set for name, chosen in settings.items()},
    )
    base = sides.candidate.base
    set_here = {
        name: [text for text in chosen.chosen if text.partition("=")[0] in base]
        for name, chosen in settings.items()
    }
    notes = [
        f"set, so that a small model exercises {name}: {' '.join(texts)}"
        for name, texts in set_here.items()
        if texts
    ]
    return attrs.evolve(sides, left_out=tuple(found), notes=(*sides.notes, *notes))


def _same_layout(with_dropout: Side, undrawn: Callable[[Side], Side]) -> tuple[Side | None, str]:
    """The same run without dropout; None, and the reason, if it cannot start."""
    try:
        with_dropout.prepare()
    except AscendRunError as error:
        return None, _reason(error)
    named = attrs.evolve(with_dropout, name="the same layout without")
    return undrawn(named), ""


def _notes(
    sides: Sides,
    dropping: Side,
    refused: str,
    models: tuple[str, ...],
    *,
    built_in: str | None,
) -> Iterator[str]:
    """What the comparison can and cannot show.

    Args:
        dropping: The candidate with its dropout and noise.
        refused: Why the candidate's layout cannot run without the plugins; empty if it can.
        models: Plugins that change the model by design.
        built_in: The built-in model, if no config file is given.
    """
    if refused:
        yield f"no run in this layout without the plugins: {refused}"
    if sides.training_precision is not None:
        precision = sides.training_precision.name
        yield (
            f"the run trains in {precision}: compared in float64 and float32, where faults are "
            f"larger than rounding errors, and in {precision} by its error relative to those runs"
        )
    if models:
        yield (
            f"{', '.join(models)} changes the model by design; it is compared with the same model "
            "on one rank"
        )
    if has_dropout(dropping) and sides.with_dropout is None:
        yield "compared without dropout, as no other run draws the same masks in this layout"
    if has_noise(dropping, one_rank=sides.candidate.world_size == 1 and sides.against is None):
        yield "compared with routers that go by the logits alone; the others depend on the layout"
    if built_in is not None:
        yield f"model: the built-in '{built_in}' with random data; use --config for your model"
    references = (sides.plain, sides.same_layout, sides.against)
    if all(is_same_run(sides.candidate, side) for side in references if side):
        independent = "this only shows that the run is reproducible"
        if not sides.unknown:
            independent = "only the oracle shows more than that the run is reproducible"
        yield f"both runs are the same: {independent}"
    if sides.unknown:
        yield f"not compared with the oracle: {'; '.join(sides.unknown)}"


def _training_precision(
    question: Question, candidate: Side, reference: Side
) -> TrainingPrecision | None:
    sides = [_as_configured(question, side) for side in (candidate, reference)]
    name = sides[0].prepare().config.train.precision
    if name == EXACT:
        return None
    sides = [attrs.evolve(side, name=f"{side.name}, in {name}", saves=False) for side in sides]
    sides[1].prepare()
    return TrainingPrecision(name=name, candidate=sides[0], reference=sides[1])


def _masks(question: Question, dropping: Side) -> Side | None:
    """Return the run to record dropout masks of; the built-in model gets dropout if it has none."""
    side = dropping if question.file is not None else with_dropout(dropping)
    name = f"{side.name}, dropout masks"
    return attrs.evolve(side, name=name, only_masks=True) if has_dropout(side) else None


def _resumable(question: Question, dropping: Side) -> Side | None:
    """Return the run to stop and resume.

    The built-in model has dropout if the run can have it, as masks depend on what is restored.
    """
    if not question.resume:
        return None
    side = _as_configured(question, dropping)
    return side if question.file is not None else with_dropout(side)


def _as_configured(question: Question, side: Side) -> Side:
    """Return a run in the precision of the file or of a setting."""
    values = {key: value for key, value in side.values.items() if key != PRECISION}
    if PRECISION in question.config:
        values[PRECISION] = question.config[PRECISION]
    side = attrs.evolve(side, values=values)
    if side.prepare().config.train.precision != "fp16":
        return side
    # With a loss scale that overflows, the few steps would be skipped.
    return attrs.evolve(side, values={**values, "optimizer.initial_loss_scale": LOSS_SCALE})


def _plugins(prepared: PreparedRun, enabled: tuple[str, ...]) -> dict[str, Any]:
    """Name -> class, for every enabled feature."""
    known = {plugin.manifest.name: plugin for plugin in prepared.resolution.order}
    aliases = {alias: plugin for plugin in known.values() for alias in plugin.manifest.aliases}
    return {name: known.get(name) or aliases[name] for name in enabled}


def _reason(error: AscendRunError) -> str:
    return error.problems[0] if error.problems else error.headline
