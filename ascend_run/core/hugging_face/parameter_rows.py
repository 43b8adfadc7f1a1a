"""Map rows of parameters to rows of a Hugging Face folder's tensors. Torch-free.

Parameters are unsharded here; a rank's shard is a box of the unsharded parameter. Import fills
boxes from the runs below, and export gathers tensors along the same runs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import attrs

from ascend_run.core.config.vocabulary import has_tied_output
from ascend_run.plugin_api.contracts import ModelFamily, TensorMap
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.types.config import RunConfig

from .derived_fields import model_value

EMBEDDING: Final = "embedding.word_embeddings.weight"
_OUTPUT: Final = "output_layer."
OUTPUT_LAYER: Final = f"{_OUTPUT}weight"
SCORE: Final = "score.weight"
"""The score head, here and in Hugging Face's classes for sequence classification."""
VOCABULARY_PARAMETERS: Final = frozenset({EMBEDDING, OUTPUT_LAYER})
"""Matrices with one row per token; ours are padded with unused rows at the end."""
_MTP: Final = {
    **{name: name for name in ("enorm", "hnorm", "eh_proj")},
    "final_layernorm": "shared_head.norm",
}
_SHARED_HEAD: Final = ".shared_head.head.weight"


@attrs.frozen
class RowRun:
    """Consecutive rows of a parameter that are consecutive rows of one stored tensor."""

    hf: str
    hf_start: int
    start: int
    """First row in the parameter, or in its expert's matrix."""
    rows: int
    expert: int | None = None
    """Index on axis 0 of a parameter that stacks experts."""
    transposed: bool = False
    """Whether they are columns of the stored tensor."""
    hf_expert: int | None = None
    """Index on axis 0 of a stored tensor that stacks experts."""
    hf_step: int = 1
    """Distance between consecutive rows in the stored tensor."""

    def stored(self, begin: int, end: int) -> slice:
        """Return where rows ``begin:end`` of the parameter are in the stored tensor."""
        first = self.hf_start + (begin - self.start) * self.hf_step
        return slice(first, first + (end - begin - 1) * self.hf_step + 1, self.hf_step)


@attrs.frozen
class ParameterSource:
    """One parameter and the names of the stored tensors it is built from."""

    name: str
    form: str
    hf: tuple[tuple[str, ...], ...]
    """One tuple of names per expert for a stacked parameter, else a single tuple."""
    transposed: bool = False

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.hf))


def parameter_sources(family: ModelFamily, config: RunConfig) -> dict[str, ParameterSource]:
    """Return every parameter of the full model by name; the output layer only if it is not tied."""
    tied = has_tied_output(config.model)
    maps = [
        tensor_map
        for tensor_map in family.tensors
        if not (tied and tensor_map.megatron == OUTPUT_LAYER)
        and not (config.model.num_labels and tensor_map.megatron.startswith(_OUTPUT))
        and (tensor_map.condition is None or tensor_map.condition.holds(config))
    ]
    sources = [source for tensor_map in maps for source in _expand(tensor_map, config)]
    if config.model.num_labels:
        sources.append(ParameterSource(SCORE, "copy", ((SCORE,),)))
    return {source.name: source for source in (*sources, *_mtp_sources(maps, config))}


def output_names(family: ModelFamily) -> set[str]:
    """Return the stored names of the output layer's tensors."""
    maps = (each for each in family.tensors if each.megatron.startswith(_OUTPUT))
    return {name for tensor_map in maps for name in tensor_map.hf}


def tied_copy(family: ModelFamily) -> tuple[str, str]:
    """Return the stored names of the output layer and of the embedding that it may be tied to."""
    names = {tensor_map.megatron: tensor_map.hf[0] for tensor_map in family.tensors}
    return names[OUTPUT_LAYER], names[EMBEDDING]


def mtp_copies(family: ModelFamily, config: RunConfig) -> dict[str, str]:
    """Return the names under which the layers of multi-token prediction store the embedding and the
    output layer once more, with the names of the originals."""
    output, embedding = tied_copy(family)
    if config.model.share_embeddings_and_output_weights:
        output = embedding
    return {
        _mtp_layer(family.tensors, config, depth) + name: original
        for depth in range(config.model.mtp_num_layers or 0)
        for name, original in ((".embed_tokens.weight", embedding), (_SHARED_HEAD, output))
    }


def num_stored_depths(names: Collection[str], family: ModelFamily, config: RunConfig) -> int:
    """Return how many layers of multi-token prediction a folder stores after the model's."""
    projections = (
        f"{_mtp_layer(family.tensors, config, depth)}.{_MTP['eh_proj']}.weight"
        for depth in itertools.count()
    )
    return len([*itertools.takewhile(names.__contains__, projections)])


def later_layers(names: Collection[str], family: ModelFamily, config: RunConfig) -> set[str]:
    """Return the names of the tensors of layers after the model's last one."""
    layer = re.compile(re.escape(_layers_prefix(family.tensors)) + r"(\d+)\.")
    numbers = {name: layer.match(name) for name in names}
    return {name for name, m in numbers.items() if m and int(m[1]) >= config.model.num_layers}


def row_runs(
    source: ParameterSource, shape: Sequence[int], config: RunConfig
) -> tuple[RowRun, ...]:
    """Return the runs of rows that form an unsharded parameter.

    Args:
        shape: Shape of the unsharded parameter, including vocabulary padding.

    Raises:
        ValueError: The shape is invalid for this form; states the expected one.
    """
    runs = _runs(source, shape, config)
    if source.transposed:
        return tuple(attrs.evolve(run, transposed=True) for run in runs)
    return runs


def _runs(source: ParameterSource, shape: Sequence[int], config: RunConfig) -> tuple[RowRun, ...]:
    if source.form == "copy":
        rows = shape[0]
        if source.name in VOCABULARY_PARAMETERS:
            rows = config.model.vocab_size
            if shape[0] < rows:
                raise ValueError(f"{shape[0]} rows hold no vocabulary of {rows}")
        return (RowRun(source.hf[0][0], 0, 0, rows),)
    if source.form == "qkv":
        return _grouped_rows(source.hf[0], shape[0], config)
    if source.form == "concat":
        return _concatenated_rows(source.hf[0], shape[0])
    experts = config.model.num_moe_experts
    if shape[0] != experts:
        raise ValueError(f"{shape[0]} experts on its first axis, expected {experts}")
    if source.form in ("stacked", "stacked_interleaved"):
        return _stacked_rows(source.hf[0][0], shape, 1 if source.form == "stacked" else 2)
    assert source.form == "stack_experts", f"{source.name}: no form {source.form!r}"
    return tuple(
        attrs.evolve(run, expert=expert)
        for expert, names in enumerate(source.hf)
        for run in _concatenated_rows(names, shape[1])
    )


def stored_shapes(runs: Sequence[RowRun], shape: Sequence[int]) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every stored tensor that a parameter of this shape is built from."""
    stacked = runs[0].expert is not None
    if runs[0].hf_expert is not None:
        of_one = tuple(shape[1:])
        return {runs[0].hf: (shape[0], *(of_one[::-1] if runs[0].transposed else of_one))}
    rows: dict[str, int] = {}
    for run in runs:
        rows[run.hf] = rows.get(run.hf, 0) + run.rows
    shapes = {name: (count, *shape[2 if stacked else 1 :]) for name, count in rows.items()}
    if runs[0].transposed:
        return {name: shape[::-1] for name, shape in shapes.items()}
    return shapes


def _expand(tensor_map: TensorMap, config: RunConfig) -> Iterator[ParameterSource]:
    layers = _layers(tensor_map, config) if "{layer}" in tensor_map.megatron else (0,)
    for layer in layers:
        yield _source(tensor_map, config, layer)


def _source(tensor_map: TensorMap, config: RunConfig, layer: int) -> ParameterSource:
    stacked = tensor_map.form == "stack_experts"
    experts = range(config.model.num_moe_experts or 0) if stacked else range(1)
    return ParameterSource(
        name=tensor_map.megatron.format(layer=layer),
        form=tensor_map.form,
        transposed=tensor_map.transposed,
        hf=tuple(
            tuple(name.format(layer=layer, expert=expert) for name in tensor_map.hf)
            for expert in experts
        ),
    )


def _mtp_sources(maps: Sequence[TensorMap], config: RunConfig) -> Iterator[ParameterSource]:
    """Yield the layers of multi-token prediction, stored as by DeepSeek-V3: after the model's."""
    count = config.model.num_layers
    for depth in range(config.model.mtp_num_layers or 0):
        ours, theirs = f"mtp.layers.{depth}", _mtp_layer(maps, config, depth)
        for name, stored in _MTP.items():
            yield ParameterSource(
                f"{ours}.{name}.weight", "copy", ((f"{theirs}.{stored}.weight",),)
            )
        for tensor_map in maps:
            if "{layer}" in tensor_map.megatron and count - 1 in _layers(tensor_map, config):
                source = _source(tensor_map, config, count + depth)
                inner = source.name.removeprefix(f"decoder.layers.{count + depth}")
                yield attrs.evolve(source, name=f"{ours}.transformer_layer{inner}")


def _mtp_layer(maps: Sequence[TensorMap], config: RunConfig, depth: int) -> str:
    """Return the stored prefix of a layer, such as ``model.layers.61``."""
    return _layers_prefix(maps) + str(config.model.num_layers + depth)


def _layers_prefix(maps: Sequence[TensorMap]) -> str:
    of_layers = next(name for tensor_map in maps for name in tensor_map.hf if "{layer}" in name)
    return of_layers.partition("{layer}")[0]


def _layers(tensor_map: TensorMap, config: RunConfig) -> Sequence[int]:
    every = range(config.model.num_layers)
    if tensor_map.layers == "all":
        return every
    assert tensor_map.layers in ("dense", "experts"), f"{tensor_map.megatron}: {tensor_map.layers}"
    experts, wanted = moe_layers(config.model), tensor_map.layers == "experts"
    return [layer for layer in every if (layer in experts) is wanted]


def _grouped_rows(names: Sequence[str], rows: int, config: RunConfig) -> tuple[RowRun, ...]:
    """Return Megatron's order of query, key and value rows.

    Key-value groups are consecutive; each has its query heads, its key and its value.

    Args:
        names: Stored names of queries, keys and values, or of one tensor with all three in order.
    """
    groups = model_value(config, "num_query_groups")
    width = model_value(config, "kv_channels")
    heads = config.model.num_attention_heads // groups  # query heads of one group
    query, key, value = names if len(names) == 3 else [*names] * 3
    fused = len(names) == 1
    keys = groups * heads * width if fused else 0
    values = keys + groups * width if fused else 0
    if rows != (expected := groups * (heads + 2) * width):
        raise ValueError(
            f"{rows} rows; {groups} groups of {heads} query heads, a key and a value, each "
            f"{width} wide, are {expected}"
        )
    runs = []
    for group in range(groups):
        start = group * (heads + 2) * width
        runs += [
            RowRun(query, group * heads * width, start, heads * width),
            RowRun(key, keys + group * width, start + heads * width, width),
            RowRun(value, values + group * width, start + (heads + 1) * width, width),
        ]
    return tuple(runs)


def _concatenated_rows(names: Sequence[str], rows: int) -> tuple[RowRun, ...]:
    each, rest = divmod(rows, len(names))
    if rest:
        raise ValueError(f"{rows} rows are not {len(names)} equal parts")
    return tuple(RowRun(name, 0, part * each, each) for part, name in enumerate(names))


def _stacked_rows(name: str, shape: Sequence[int], parts: int) -> tuple[RowRun, ...]:
    """Return the rows of each expert in one stored tensor.

    Args:
        parts: Number of projections whose rows alternate there.
    """
    each, rest = divmod(shape[1], parts)
    if rest:
        raise ValueError(f"{shape[1]} rows are not {parts} equal parts")
    return tuple(
        RowRun(name, part, part * each, each, expert, hf_expert=expert, hf_step=parts)
        for expert in range(shape[0])
        for part in range(parts)
    )
