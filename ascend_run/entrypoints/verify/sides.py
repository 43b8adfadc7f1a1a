"""The runs that answer a question: which are made, and which of them are compared. Imports no
torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.core.config.layout import layout_of
from ascend_run.core.config.raw import COMMAND_LINE
from ascend_run.core.config.reading import read_raw
from ascend_run.core.verify.thresholds import ADAM_EPSILON, LEARNING_RATE, LOSS_SCALE, WARMUP
from ascend_run.entrypoints.planning import Prepared, prepare_raw
from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.plugin_api.testing.models import MODELS

from . import layouts
from .questions import Question, Side

_KIT_DATASET: Final = "the-kit"
_DROPOUT: Final = ("model.hidden_dropout", "model.attention_dropout")
_PRECISION: Final = "train.precision"
_EXACT: Final = "fp32"
_PROBES: Final[Mapping[str, Any]] = {
    "optimizer.lr": LEARNING_RATE,
    "optimizer.min_lr": 0.0,
    "optimizer.lr_warmup_iters": WARMUP,
    "optimizer.adam_eps": ADAM_EPSILON,
    _PRECISION: _EXACT,
}


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
    file_enables, sizes = _from_file(question)
    beside = tuple(dict.fromkeys((*file_enables, *question.beside)))
    beside = tuple(name for name in beside if name not in question.enable)
    other = None if question.against is None else layouts.with_dp(question.against)
    notes: list[str] = []

    def side(name: str, enable: tuple[str, ...], of: Mapping[str, int], model: str) -> Side:
        return _side(question, name, enable, of, model, [sizes, other or {}])

    enabled = (*beside, *question.enable)
    model, dropping = _candidate(question, enabled, sizes, side)
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
        values = {key: value for key, value in side.values.items() if key != _PRECISION}
        if _PRECISION in question.config:
            values[_PRECISION] = question.config[_PRECISION]
        return attrs.evolve(side, values=values)

    name = own(candidate).prepare().config.train.precision
    if name == _EXACT:
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


def _from_file(question: Question) -> tuple[tuple[str, ...], dict[str, int]]:
    """The features and the layout that a file asks for; the question's layout counts over it."""
    if question.layout is not None:
        sizes = layouts.with_dp(question.layout)
        if question.file is None:
            return (), sizes
        return read_raw(Path(question.file)).enable, sizes
    if question.file is None:
        return (), {"dp": 1}
    raw = read_raw(Path(question.file), question.overrides)
    enable = [*dict.fromkeys((*raw.enable, *question.beside, *question.enable))]
    prepared = prepare_raw(
        raw.replacing(COMMAND_LINE, enable=enable, platform=question.platform, task=question.task)
    )
    layout = layout_of(prepared.config, prepared.config.run.nproc)
    sizes = {
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "ep": layout.ep,
        "expt_tp": layout.expt_tp,
        "dp": layout.dp,
    }
    if chunks := prepared.config.parallel.virtual_pipeline_model_parallel_size:
        sizes["vpp"] = chunks
    if prepared.config.parallel.sequence_parallel:
        sizes["sp"] = 1
    return raw.enable, sizes


def _candidate(
    question: Question, enabled: tuple[str, ...], sizes: Mapping[str, int], side: Any
) -> tuple[str, Side]:
    """The run under test and its built-in model: dense, unless something needs experts."""
    name = f"{', '.join(enabled) or 'no plugin'} on {layouts.shown(sizes)}"
    if question.file is not None or question.model is not None:
        model = question.model or "dense"
        return model, side(name, enabled, sizes, model)
    needs_experts = sizes.get("ep", 1) > 1 or "expt_tp" in sizes
    first: AscendRunError | None = None
    for model in ("moe",) if needs_experts else ("dense", "moe"):
        candidate: Side = side(name, enabled, sizes, model)
        try:
            prepared = candidate.prepare()
        except AscendRunError as error:
            first = first or error
            continue
        idle = set(prepared.plan["idle"]) & set(question.enable)
        if not idle or model == "moe":
            return model, candidate
    if first is not None:
        # Idle with one model and refused with the other: what idles has nothing to be wrong in.
        raise first
    raise AssertionError("a model is either refused or returned")


def _side(
    question: Question,
    name: str,
    enable: tuple[str, ...],
    sizes: Mapping[str, int],
    model: str,
    all_sizes: list[Mapping[str, int]],
) -> Side:
    base: dict[str, Any] = {}
    sizes = dict(sizes)
    if question.file is None:
        base = {**MODELS[model], "data.train": [_KIT_DATASET], **_fitting(MODELS[model], all_sizes)}
        if model == "moe" and sizes.get("tp", 1) > 1:
            sizes["sp"] = 1  # experts under tensor parallelism need it
    values = {**question.config, **layouts.settings(sizes), **_PROBES}
    return Side(
        name=name,
        world_size=layouts.world_size(sizes),
        enable=enable,
        values=values,
        base=base,
        file=question.file,
        overrides=question.overrides,
        platform=question.platform,
        task=question.task,
        steps=question.steps,
    )


def _fitting(model: Mapping[str, Any], all_sizes: list[Mapping[str, int]]) -> dict[str, Any]:
    """Layers and samples of the built-in model that every layout in question can deal out, with
    two micro-batches a rank at least."""
    num_layers, samples = int(model["model.num_layers"]), int(model["train.global_batch_size"])
    for sizes in all_sizes:
        pp, dp = sizes.get("pp", 1), sizes.get("dp", 1)
        num_layers = math.lcm(num_layers, pp * sizes.get("vpp", 1))
        samples = math.lcm(samples, 2 * dp, pp * dp)
    return {"model.num_layers": num_layers, "train.global_batch_size": samples}


def _numerics(prepared: Prepared, enabled: tuple[str, ...]) -> dict[str, Numerics]:
    known = {plugin.manifest.name: plugin.manifest for plugin in prepared.resolution.order}
    aliases = {alias: m for m in known.values() for alias in m.aliases}
    return {name: (known.get(name) or aliases[name]).numerics for name in enabled}


def _differs(one: Side, other: Side) -> bool:
    return attrs.evolve(one, name="") != attrs.evolve(other, name="")


def _reason(error: AscendRunError) -> str:
    return error.problems[0] if error.problems else error.headline
