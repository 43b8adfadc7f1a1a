"""Assign layers to pipeline stages: a pure function of the config, without torch.

The rules are Megatron's (``get_num_layers_to_build``, ``PipelineParallelLayerLayout``) and tested
against it. A rank holds one chunk of layers, or several with a virtual pipeline; chunk ``v`` of
pipeline rank ``p`` is the virtual stage ``v * pp + p`` of the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, TypeAlias

from ascend_run.types.config import RunConfig

StageLayers: TypeAlias = tuple[tuple[range, ...], ...]
"""Pipeline rank -> chunk -> global indices of its layers."""

LETTERS: Final = {"E": "embedding", "t": "decoder", "L": "loss"}
"""Maps a letter of ``pipeline_model_parallel_layout`` to the kind of layer."""
_LONGEST: Final = 10_000
"""Maximum number of letters, so that a typo cannot exhaust memory."""
_REPEATED: Final = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))


def stage_layers(config: RunConfig) -> StageLayers:
    """Return the layers of every chunk. The config must pass ``stage_problems``."""
    pp = config.parallel.pipeline_model_parallel_size
    counts = _layer_counts(config)
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    ranges = [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
    return tuple(tuple(ranges[rank::pp]) for rank in range(pp))


def virtual_size(config: RunConfig) -> int | None:
    """Return the number of chunks per rank, from the option or the layout; None for one chunk."""
    size: int | None = config.parallel.virtual_pipeline_model_parallel_size
    layout = config.model.pipeline_model_parallel_layout
    if size is None and layout is not None:
        pp = config.parallel.pipeline_model_parallel_size
        listed = len(listed_stages(layout)) // pp
        return listed if listed > 1 else None
    return size


def _layer_counts(config: RunConfig) -> list[int]:
    """Return the number of layers of every virtual stage, in model order."""
    model, parallel = config.model, config.parallel
    pp = parallel.pipeline_model_parallel_size
    if pp == 1:
        return [model.num_layers]
    if model.pipeline_model_parallel_layout is not None:
        listed = listed_stages(model.pipeline_model_parallel_layout)
        return [stage.count("decoder") for stage in listed]
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    ends = (model.num_layers_in_first_pipeline_stage, model.num_layers_in_last_pipeline_stage)
    if ends != (None, None):
        first, last, middle = uneven_split(config)
        ranks = [middle] * pp
        ranks[0] = middle if first is None else first
        ranks[-1] = middle if last is None else last
        return [layers // chunks for layers in ranks] * chunks
    embedding = int(model.account_for_embedding_in_pipeline_split)
    loss = int(model.account_for_loss_in_pipeline_split)
    counts = [(model.num_layers + embedding + loss) // (pp * chunks)] * (pp * chunks)
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def uneven_split(config: RunConfig) -> tuple[int | None, int | None, int]:
    """Return the number of layers on the first rank, on the last rank, and on each rank between."""
    model = config.model
    first = model.num_layers_in_first_pipeline_stage
    last = model.num_layers_in_last_pipeline_stage
    rest = model.num_layers - (first or 0) - (last or 0)
    ranks = config.parallel.pipeline_model_parallel_size - sum(n is not None for n in (first, last))
    return first, last, rest // ranks if ranks else 0


def listed_stages(layout: str | Sequence[str | Sequence[object]]) -> list[list[str]]:
    """Return the kinds of layer in every virtual stage; unknown letters are kept."""
    if not isinstance(layout, str):
        stages = [[stage] if isinstance(stage, str) else stage for stage in layout]
        return [[str(kind).strip().lower() for kind in stage] for stage in stages]
    text = layout.replace(",", "")
    for pattern in _REPEATED:
        text = pattern.sub(lambda match: match[1] * int(match[2][:3]), text)[:_LONGEST]
    return [[LETTERS.get(letter, letter) for letter in stage] for stage in text.split("|")]
