"""Build one of the runs to compare, from a config file or a built-in model. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.core.config.layout import layout_of
from ascend_run.plugin_api import AscendRunError, Manifest, ModelFamily
from ascend_run.prepare.config.raw import COMMAND_LINE
from ascend_run.prepare.config.reading import read_raw
from ascend_run.prepare.prepare import prepare_raw
from ascend_run.testing.models import MODELS
from ascend_run.testing.small_settings import settings_of
from ascend_run.tools.convert.model_config import load_family
from ascend_run.tools.verify.compare.thresholds import ADAM_EPSILON, LEARNING_RATE, WARMUP
from ascend_run.types.layout import world_size

from . import layouts
from .questions import KIT_DATASET, Question, Side
from .small_settings import manifests_of, saves

_WIDE_HEADS: Final = {"model.kv_channels": 8}
"""Not hidden size / heads, which is 4: a formula that takes one for the other is found."""
_EXPERTS: Final = "model.num_moe_experts"
_LATENT: Final = "model.multi_latent_attention"
QUERY_GROUPS: Final = "model.num_query_groups"
_CLIPPING: Final[Mapping[int, float]] = {4: 3.8, 8: 3.1, 12: 3.125, 16: 2.57}
"""Size of the global batch -> threshold between the gradient norms of the steps of the built-in
models, of which the largest are below twice the threshold: steps are clipped by less than half, and
not at all."""
PRECISION: Final = "train.precision"
RATE: Final = "optimizer.lr"
EXACT: Final = "fp32"
PROBES: Final[Mapping[str, object]] = {
    RATE: LEARNING_RATE,
    "optimizer.min_lr": 0.0,
    "optimizer.lr_warmup_iters": WARMUP,
    "optimizer.adam_eps": ADAM_EPSILON,
    PRECISION: EXACT,
}
"""Settings with which rounding errors stay small and faults show in a few steps."""


def from_file(question: Question) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the features and the layout of the config file; ``question.layout`` overrides it."""
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


def find_candidate(
    question: Question, enabled: tuple[str, ...], sizes: Mapping[str, int], side: Any
) -> tuple[str, Side]:
    """Return the built-in model, which is dense unless experts are needed, and the candidate."""
    name = f"{', '.join(enabled) or 'no plugin'} on {layouts.shown(sizes)}"
    if question.file is not None or question.model is not None:
        model = question.model or "dense"
        return model, side(name, enabled, sizes, model)
    needs_experts = sizes.get("ep", 1) > 1 or "expt_tp" in sizes or _has_experts(question)
    first: AscendRunError | None = None
    for model in ("moe",) if needs_experts else ("dense", "moe"):
        candidate: Side = side(name, enabled, sizes, model)
        try:
            prepared = candidate.prepare()
        except AscendRunError as error:
            first = first or error
            continue
        idle = set(prepared.idle) & set(question.enable)
        if not idle or model == "moe":
            return model, candidate
    if first is not None:
        # Idle with one model and rejected with the other: an idle plugin cannot be verified.
        raise first
    raise AssertionError("every model is either rejected or returned")


def make_side(
    question: Question,
    name: str,
    enable: tuple[str, ...],
    sizes: Mapping[str, int],
    model: str,
    all_sizes: list[Mapping[str, int]],
) -> Side:
    base: dict[str, object] = {}
    sizes = dict(sizes)
    built_in = question.file is None
    tested = manifests_of([*question.beside, *question.enable])
    for manifest in tested.values():
        base |= settings_of(manifest, of_model=built_in)
    small = {key for key in base if key.startswith("plugins.")}
    if built_in:
        heads = {} if _sets_head_widths(question) else _WIDE_HEADS
        base = {**MODELS[model], **heads, "data.train": [KIT_DATASET], **base}
        base |= _fitting(base, all_sizes)
        if has_latent_attention(question):
            del base[QUERY_GROUPS]  # each head has its own key
        samples = int(str(base["train.global_batch_size"]))
        base = {"optimizer.clip_grad": _CLIPPING.get(samples, _CLIPPING[4]), **base}
        if model == "moe" and sizes.get("tp", 1) > 1:
            sizes["sp"] = 1  # experts under tensor parallelism need it
    values = {**question.config, **layouts.settings(sizes), **_probes(tested.values())}
    side = Side(
        name=name,
        world_size=world_size(sizes),
        enable=enable,
        values=values,
        base=base,
        file=question.file,
        overrides=question.overrides,
        platform=question.platform,
        task=question.task,
        steps=question.steps,
        saves=any(saves(name) for name in question.enable),
    )
    left = {key: value for key, value in base.items() if key not in small}
    given = attrs.evolve(side, base=left)  # the user's options may exclude those of small models
    return given if small and not _starts(side) and _starts(given) else side


def _probes(tested: Iterable[Manifest]) -> dict[str, object]:
    """Return ``PROBES``, with the learning rate that a plugin under test declares in its
    ``small_model_settings``: the rounding of its states in another layout stays small with it."""
    found = dict(PROBES)
    for manifest in tested:
        found[RATE] = manifest.small_model_settings.get(RATE, found[RATE])
    return found


def _starts(side: Side) -> bool:
    try:
        side.prepare()
    except AscendRunError:
        return False
    return True


def _fitting(model: Mapping[str, Any], all_sizes: list[Mapping[str, int]]) -> dict[str, object]:
    """Number of layers, batch size and sequence length of the built-in model that are divisible in
    every layout, with at least two micro-batches per rank, and an odd number of the smallest parts
    of a sequence that context parallelism cuts (four for each rank)."""
    num_layers, samples = int(model["model.num_layers"]), int(model["train.global_batch_size"])
    least, unit = int(model["data.seq_length"]), 1
    for sizes in all_sizes:
        pp, dp = sizes.get("pp", 1), sizes.get("dp", 1)
        num_layers = math.lcm(num_layers, pp * sizes.get("vpp", 1))
        samples = math.lcm(samples, 2 * dp, pp * dp)
        cp = sizes.get("cp", 1)
        unit = math.lcm(unit, sizes.get("tp", 1) * (4 * cp if cp > 1 else 1))
    parts = -(-least // unit)
    return {
        "model.num_layers": num_layers,
        "train.global_batch_size": samples,
        "data.seq_length": unit * (parts + 1 - parts % 2),
    }


def _sets_head_widths(question: Question) -> bool:
    """Return whether the question's settings may choose the widths of heads: those of another
    family, or of multi-latent attention."""
    return not _given(question).keys().isdisjoint(("model.family", _LATENT))


def _has_experts(question: Question) -> bool:
    """Return whether the question's family is one of models with experts."""
    family = _family(question)
    return family is not None and any(key.field == _EXPERTS for key in family.keys)


def has_latent_attention(question: Question) -> bool:
    """Return whether the question's family or settings choose multi-latent attention."""
    family = _family(question)
    default = family is not None and bool(family.defaults.get(_LATENT))
    return bool(_given(question).get(_LATENT, default))


def _family(question: Question) -> ModelFamily | None:
    """Return the family that is set for a built-in model; None if there is none of this name, which
    planning the run reports."""
    name = _given(question).get("model.family")
    try:
        return load_family(name) if isinstance(name, str) else None
    except AscendRunError:
        return None


def names_family(question: Question) -> bool:
    """Return whether the user chose the model's family."""
    chosen = _given(question).keys() & {"model.family", "model.hf_path"}
    return question.file is not None or bool(chosen)


def _given(question: Question) -> dict[str, Any]:
    """Return the question's settings, as config key -> value."""
    read = read_raw(None, question.overrides).values
    return {**{key: raw.value for key, raw in read.items()}, **question.config}
