"""What is asked, and the runs that answer it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.core.config.layout import layout_of
from ascend_run.core.config.raw import COMMAND_LINE, Given, RawConfig
from ascend_run.core.config.reading import read_raw
from ascend_run.core.verify.thresholds import ADAM_EPSILON, STEPS
from ascend_run.entrypoints.planning import Prepared, prepare_raw
from ascend_run.plugin_api import AscendRunError, Numerics
from ascend_run.plugin_api.testing.models import MODELS

from . import layouts

ORIGIN: Final = "verify"
_KIT_DATASET: Final = "the-kit"
_PROBES: Final[Mapping[str, Any]] = {
    # The first step moves, and it moves by what the gradient says.
    "optimizer.lr_warmup_iters": 0,
    "optimizer.adam_eps": ADAM_EPSILON,
    "train.precision": "fp32",
}


@attrs.frozen(kw_only=True)
class Question:
    """Plugins, a layout, a model, and what to compare them with."""

    enable: tuple[str, ...] = ()
    """Features under test. None tests the layout."""
    beside: tuple[str, ...] = ()
    """Features that are enabled in the reference of the same layout as well."""
    layout: Mapping[str, int] | None = None
    """As ``layouts.parse_layout`` answers; None is the file's, or one rank."""
    against: Mapping[str, int] | None = None
    """One more layout to compare with, without the plugins."""
    model: str | None = None
    """Of ``testing.models.MODELS``, where no file is given; None chooses."""
    file: str | None = None
    overrides: tuple[str, ...] = ()
    """``section.key=value``; those of a plugin count where it is enabled."""
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """The same as values."""
    platform: str | None = None
    task: str | None = None
    steps: int = STEPS


@attrs.frozen(kw_only=True)
class Side:
    """One run: JSON can hold all of it, so that ranks can be told."""

    name: str
    """In words."""
    world_size: int
    enable: tuple[str, ...]
    values: Mapping[str, Any]
    """Config keys that count over everything else."""
    base: Mapping[str, Any]
    """Config keys that everything else counts over: a built-in model."""
    file: str | None
    overrides: tuple[str, ...]
    platform: str | None
    task: str | None
    steps: int

    @property
    def uses_kit_batches(self) -> bool:
        return self.file is None

    def as_request(self) -> dict[str, Any]:
        return attrs.asdict(self)

    @classmethod
    def of_request(cls, request: Mapping[str, Any]) -> Side:
        data = {name: request[name] for name in attrs.fields_dict(cls)}
        return cls(
            **{**data, "enable": tuple(data["enable"]), "overrides": tuple(data["overrides"])}
        )

    def prepare(self) -> Prepared:
        """
        Raises:
            AscendRunError: This run cannot be made.
        """
        file = None if self.file is None else Path(self.file)
        asked = read_raw(file, [word for word in self.overrides if self._counts(word)])
        base = {key: Given(value, ORIGIN) for key, value in self.base.items()}
        values = {
            key: Given(value, ORIGIN) for key, value in self.values.items() if self._counts(key)
        }
        raw = RawConfig(values={**base, **asked.values, **values}, problems=asked.problems)
        raw = raw.replacing(
            COMMAND_LINE, enable=[*self.enable], platform=self.platform, task=self.task
        )
        return prepare_raw(raw, self.world_size)

    def _counts(self, key: str) -> bool:
        """A plugin's options are refused where it is not enabled."""
        words = key.partition("=")[0].split(".")
        return words[0].strip() != "plugins" or len(words) < 2 or words[1] in self.enable


@attrs.frozen(kw_only=True)
class Sides:
    """The candidate and what it is compared with."""

    candidate: Side
    plain: Side
    """On one rank, with those plugins only that are another model."""
    same_layout: Side | None
    """The candidate's layout without the plugins under test, where that can run."""
    against: Side | None
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
    model, candidate = _candidate(question, enabled, sizes, side)
    numerics = _numerics(candidate.prepare(), enabled)
    models = tuple(name for name in enabled if numerics[name] is Numerics.MODEL)
    plain = side("the plain model on one rank", models, {}, model)
    plain.prepare()
    same_layout: Side | None = None
    if candidate.world_size > 1 and question.enable:
        without = tuple(dict.fromkeys((*beside, *models)))
        if without != enabled:
            same_layout = side("the same layout without", without, sizes, model)
            try:
                same_layout.prepare()
            except AscendRunError as error:
                notes.append(f"no run in this layout without the plugins: {_reason(error)}")
                same_layout = None
    against = None
    if other is not None:
        name = f"{layouts.shown(other)} without"
        against = side(name, tuple(dict.fromkeys((*beside, *models))), other, model)
        against.prepare()
    if models:
        notes.append(
            f"{', '.join(models)} changes the model by design; compared is the same model on one "
            "rank"
        )
    if question.file is None:
        notes.append(f"model: the built-in '{model}' with made-up batches; --config takes yours")
    declared = {name: numerics[name] for name in question.enable}
    return Sides(
        candidate=candidate,
        plain=plain,
        same_layout=same_layout,
        against=against,
        declared=declared,
        notes=tuple(notes),
    )


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
    if layout.vpp:
        sizes["vpp"] = layout.vpp
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


def _reason(error: AscendRunError) -> str:
    return error.problems[0] if error.problems else error.headline
