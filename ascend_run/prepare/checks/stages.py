"""Check that layers can be split over pipeline stages as configured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ascend_run.core.config.stages import LETTERS, listed_stages
from ascend_run.plugin_api.error_text import around, divisors, one_of, show
from ascend_run.types.config import RunConfig

_PP: Final = "parallel.pipeline_model_parallel_size"
_VPP: Final = "parallel.virtual_pipeline_model_parallel_size"
_LAYOUT: Final = "model.pipeline_model_parallel_layout"
_FIRST: Final = "num_layers_in_first_pipeline_stage"
_LAST: Final = "num_layers_in_last_pipeline_stage"
_EMBEDDING: Final = "account_for_embedding_in_pipeline_split"
_LOSS: Final = "account_for_loss_in_pipeline_split"
_SPLITS: Final = (_FIRST, _LAST, _EMBEDDING, _LOSS)


def stage_problems(config: RunConfig) -> list[str]:
    """Return a message for each reason why layers cannot be assigned to stages as configured."""
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


def _listed_problems(config: RunConfig) -> Iterator[str]:
    layout, parallel = config.model.pipeline_model_parallel_layout, config.parallel
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    stages = listed_stages(layout)
    kinds: Sequence[str] = [kind for stage in stages for kind in stage]
    if unknown := sorted(set(kinds) - set(LETTERS.values())):
        letters = ", ".join(f"{letter} ({kind})" for letter, kind in LETTERS.items())
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
