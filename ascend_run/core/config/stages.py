"""Which layers each pipeline stage holds: a pure function of the config, without torch.

The rules are Megatron's (``get_num_layers_to_build``, ``PipelineParallelLayerLayout``) and tested
against it. A rank holds one chunk of layers, or with a virtual pipeline several; chunk ``v`` of
pipeline rank ``p`` is the virtual stage ``v * pp + p`` of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from ascend_run.plugin_api.config import RunConfig
from ascend_run.plugin_api.working_values import around, divisors, one_of

from .value_types import show

StageLayers: TypeAlias = tuple[tuple[range, ...], ...]
"""Pipeline rank -> chunk -> indices of its layers in the whole model."""

_PP: Final = "parallel.pipeline_model_parallel_size"
_VPP: Final = "parallel.virtual_pipeline_model_parallel_size"
_LAYOUT: Final = "model.pipeline_model_parallel_layout"
_FIRST: Final = "num_layers_in_first_pipeline_stage"
_LAST: Final = "num_layers_in_last_pipeline_stage"
_EMBEDDING: Final = "account_for_embedding_in_pipeline_split"
_LOSS: Final = "account_for_loss_in_pipeline_split"
_SPLITS: Final = (_FIRST, _LAST, _EMBEDDING, _LOSS)
_LETTERS: Final = {"E": "embedding", "t": "decoder", "L": "loss"}
_LONGEST: Final = 10_000
"""Letters; no model has as many layers, and a slip must not fill the memory."""
_REPEATED: Final = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))


def stage_layers(config: RunConfig) -> StageLayers:
    """The layers of every chunk; ``stage_problems`` says whether they come out even."""
    pp = config.parallel.pipeline_model_parallel_size
    counts = _layer_counts(config)
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    ranges = [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
    return tuple(tuple(ranges[rank::pp]) for rank in range(pp))


def virtual_size(config: RunConfig) -> int | None:
    """Chunks on a rank: as configured, or as the layout lists them; None for one."""
    size: int | None = config.parallel.virtual_pipeline_model_parallel_size
    layout = config.model.pipeline_model_parallel_layout
    if size is None and layout is not None:
        pp = config.parallel.pipeline_model_parallel_size
        listed = len(_listed_stages(layout)) // pp
        return listed if listed > 1 else None
    return size


def stage_problems(config: RunConfig) -> list[str]:
    """A sentence for each reason why the layers cannot be dealt out as configured."""
    model, parallel = config.model, config.parallel
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    splits = [name for name in _SPLITS if model[name]]
    if pp == 1:
        values = {f"model.{name}": model[name] for name in splits}
        values |= {_VPP: vpp, _LAYOUT: model.pipeline_model_parallel_layout}
        return [
            f"{key}={show(value)} needs {_PP} above 1; leave it out"
            for key, value in values.items()
            if value is not None
        ]
    if vpp == 1:
        return [f"{_VPP}=1 makes no chunks; use 2 or more, or leave it out"]
    if model.pipeline_model_parallel_layout is not None:
        if splits:
            named = " and ".join(f"model.{name}" for name in splits)
            return [f"{_LAYOUT} does not go with {named}; leave one of them out"]
        return list(_listed_problems(config))
    if model[_FIRST] is not None or model[_LAST] is not None:
        return list(_uneven_problems(config))
    return list(_even_problems(config))


def _layer_counts(config: RunConfig) -> list[int]:
    """Layers of every virtual stage, in the order of the model."""
    model, parallel = config.model, config.parallel
    pp = parallel.pipeline_model_parallel_size
    if pp == 1:
        return [model.num_layers]
    if model.pipeline_model_parallel_layout is not None:
        listed = _listed_stages(model.pipeline_model_parallel_layout)
        return [stage.count("decoder") for stage in listed]
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    if model[_FIRST] is not None or model[_LAST] is not None:
        first, last, middle = _uneven(config)
        ranks = [middle] * pp
        ranks[0] = middle if first is None else first
        ranks[-1] = middle if last is None else last
        return [layers // chunks for layers in ranks] * chunks
    extra = (int(model[_EMBEDDING]), int(model[_LOSS]))
    counts = [(model.num_layers + sum(extra)) // (pp * chunks)] * (pp * chunks)
    counts[0] -= extra[0]
    counts[-1] -= extra[1]
    return counts


def _even_problems(config: RunConfig) -> Iterator[str]:
    model, pp = config.model, config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
    layers, stages = model.num_layers, pp * chunks
    extra = int(model[_EMBEDDING]) + int(model[_LOSS])
    if (layers + extra) % stages == 0:
        return
    over = f"{stages} pipeline stages" if chunks == 1 else f"{pp} * {chunks} pipeline stages"
    if extra:
        named = " and ".join(f"model.{name}" for name in (_EMBEDDING, _LOSS) if model[name])
        fitting = [max(stages, near) - extra for near in _nearest(layers + extra, stages)]
        yield (
            f"model.num_layers={layers} and {extra} for {named} cannot be split over {over}; use "
            f"{one_of(sorted(set(fitting)))} layers"
        )
    else:
        yield (
            f"model.num_layers={layers} cannot be split over {over}; use {one_of(divisors(layers))}"
            f" stages or {around(layers, stages)} layers"
        )


def _nearest(number: int, unit: int) -> tuple[int, int]:
    below = number // unit * unit
    return below, below + unit


def _uneven(config: RunConfig) -> tuple[int | None, int | None, int]:
    """Layers of the first and of the last rank, and of each one between."""
    first, last = config.model[_FIRST], config.model[_LAST]
    rest = config.model.num_layers - (first or 0) - (last or 0)
    ranks = config.parallel.pipeline_model_parallel_size - sum(n is not None for n in (first, last))
    return first, last, rest // ranks if ranks else 0


def _uneven_problems(config: RunConfig) -> Iterator[str]:
    model, pp = config.model, config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
    for name in (_EMBEDDING, _LOSS):
        if model[name]:
            yield f"model.{name}=true does not go with model.{_FIRST} or model.{_LAST}"
    given = {name: model[name] for name in (_FIRST, _LAST) if model[name] is not None}
    for name, layers in given.items():
        if layers < 1 or layers % chunks:
            yield (
                f"model.{name}={layers} must be a multiple of {chunks}; use "
                f"{around(layers, chunks)}"
            )
    ranks, rest = pp - len(given), model.num_layers - sum(given.values())
    named = " and ".join(f"model.{name}={layers}" for name, layers in given.items())
    unit = ranks * chunks
    if ranks == 0 and rest:
        yield (
            f"{named} must add up to model.num_layers={model.num_layers}, as {_PP}={pp} has no "
            "rank between"
        )
    elif ranks == 0 and chunks > 1:  # Megatron divides by the number of ranks between
        yield (
            f"{named} leave no pipeline rank between, which {_VPP}={chunks} needs; name one of them"
        )
    elif ranks and (rest < unit or rest % unit):
        fitting = around(max(rest, 0), unit)
        yield (
            f"{named} leave {rest} of model.num_layers={model.num_layers} layers to {ranks} other "
            f"pipeline ranks{f' of {chunks} chunks' if chunks > 1 else ''}; leave {fitting}"
        )


def _listed_stages(layout: Any) -> list[list[str]]:
    """The kinds of layer in every virtual stage; an unknown letter stands for itself."""
    if not isinstance(layout, str):
        stages = [stage if isinstance(stage, list) else [stage] for stage in layout]
        return [[str(kind).strip().lower() for kind in stage] for stage in stages]
    text = layout.replace(",", "")
    for pattern in _REPEATED:
        text = pattern.sub(lambda match: match[1] * int(match[2][:3]), text)[:_LONGEST]
    return [[_LETTERS.get(letter, letter) for letter in stage] for stage in text.split("|")]


def _listed_problems(config: RunConfig) -> Iterator[str]:
    layout = config.model.pipeline_model_parallel_layout
    pp, vpp = (
        config.parallel.pipeline_model_parallel_size,
        config.parallel.virtual_pipeline_model_parallel_size,
    )
    stages = _listed_stages(layout)
    kinds: Sequence[str] = [kind for stage in stages for kind in stage]
    if unknown := sorted(set(kinds) - set(_LETTERS.values())):
        letters = ", ".join(f"{letter} ({kind})" for letter, kind in _LETTERS.items())
        yield f"{_LAYOUT}={show(layout)} has {', '.join(map(repr, unknown))}; expected {letters}"
    wanted = pp * (vpp or 1)
    if len(stages) % pp or (vpp is not None and len(stages) != wanted):
        fitting = f"{wanted}" if vpp is not None else around(len(stages), pp)
        yield (
            f"{_LAYOUT}={show(layout)} lists {len(stages)} stages for {_PP}={pp}"
            f"{'' if vpp is None else f' and {_VPP}={vpp}'}; list {fitting}"
        )
    ends = (stages[0][:1], stages[-1][-1:])
    if ends != (["embedding"], ["loss"]) or kinds.count("embedding") + kinds.count("loss") != 2:
        yield (
            f"{_LAYOUT}={show(layout)} must begin with the embedding (E) and end with the loss "
            "(L), each once"
        )
    if (found := kinds.count("decoder")) != config.model.num_layers:
        yield (
            f"{_LAYOUT}={show(layout)} lists {found} layers (t); "
            f"model.num_layers={config.model.num_layers}"
        )
