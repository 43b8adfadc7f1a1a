"""Which layers each stage holds, against Megatron's own functions."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ascend_run.core.config.stages import stage_layers, virtual_size
from ascend_run.prepare.checks.stages import stage_problems
from tests.support.tiny_configs import config_with

PP = "parallel__pipeline_model_parallel_size"
VPP = "parallel__virtual_pipeline_model_parallel_size"
LISTED = "model__pipeline_model_parallel_layout"
FIRST = "model__num_layers_in_first_pipeline_stage"
LAST = "model__num_layers_in_last_pipeline_stage"
EMBEDDING = "model__account_for_embedding_in_pipeline_split"
LOSS = "model__account_for_loss_in_pipeline_split"


def megatrons_layers(values: dict[str, Any]) -> list[list[range]]:
    """What Megatron's own functions say, rank by rank and chunk by chunk."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    fields = {key.partition("__")[2]: value for key, value in values.items()}
    made = TransformerConfig(hidden_size=8, num_attention_heads=1, pipeline_dtype=1, **fields)
    chunks = made.virtual_pipeline_model_parallel_size
    found = []
    for rank in range(made.pipeline_model_parallel_size):
        found.append([])
        for chunk in [None] if chunks is None else range(chunks):
            start = get_transformer_layer_offset(made, chunk, rank)
            found[-1].append(range(start, start + get_num_layers_to_build(made, chunk, rank)))
    return found


def with_something_in_it(stages: Any) -> list[list[range]]:
    """Empty ranges alike: where one begins says nothing."""
    return [[chunk or range(0) for chunk in rank] for rank in stages]


def builds_all(values: dict[str, Any]) -> bool:
    """Whether Megatron takes the values, and builds each layer once: of a last stage that is
    larger than the model it does not complain."""
    try:
        ranks = megatrons_layers(values)
    except (ValueError, AssertionError, ZeroDivisionError):
        return False
    built = sorted(index for rank in ranks for chunk in rank for index in chunk)
    return built == list(range(values["model__num_layers"]))


def test_stages_listed_as_lists_reach_megatron_as_lists() -> None:
    import torch

    from ascend_run.core.hooks import Hooks
    from ascend_run.core.model.transformer_config import make_transformer_config

    stages = '[["embedding", "decoder"], ["decoder", "loss"]]'
    made = make_transformer_config(
        config_with(**{PP: 2, LISTED: stages}), Hooks([]), torch.float32
    ).pipeline_model_parallel_layout
    counted = [[kind.name for kind in chunk] for (chunk,) in made.layout]
    assert counted == [["embedding", "decoder"], ["decoder", "loss"]]


optional_layers = st.none() | st.integers(1, 6)


@settings(max_examples=300, deadline=None)
@given(
    layers=st.integers(1, 16),
    pp=st.integers(2, 4),
    vpp=st.sampled_from([None, 2, 3]),
    split=st.one_of(
        st.fixed_dictionaries({FIRST: optional_layers, LAST: optional_layers}),
        st.fixed_dictionaries({EMBEDDING: st.booleans(), LOSS: st.booleans()}),
    ),
)
def test_what_is_not_refused_is_what_megatron_builds(
    layers: int, pp: int, vpp: int | None, split: dict[str, Any]
) -> None:
    chosen = {key: value for key, value in split.items() if value}
    values = {"model__num_layers": layers, PP: pp, **({VPP: vpp} if vpp else {}), **chosen}
    config = config_with(**values)
    if stage_problems(config):
        assert not builds_all(values)
        return
    stages = stage_layers(config)
    assert with_something_in_it(stages) == with_something_in_it(megatrons_layers(values))
    order = [stages[rank][chunk] for chunk in range(vpp or 1) for rank in range(pp)]
    assert [index for part in order for index in part] == list(range(layers))


@settings(max_examples=100, deadline=None)
@given(
    pp=st.integers(2, 3),
    chunks=st.integers(1, 3),
    data=st.data(),
)
def test_a_listed_layout_is_read_as_megatron_reads_it(
    pp: int, chunks: int, data: st.DataObject
) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    counts = data.draw(st.lists(st.integers(0, 3), min_size=pp * chunks, max_size=pp * chunks))
    assume(sum(counts))
    stages = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    text = "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])
    config = config_with(**{"model__num_layers": sum(counts), PP: pp, LISTED: text})
    assert stage_problems(config) == []
    assert virtual_size(config) == (chunks if chunks > 1 else None)
    theirs = PipelineParallelLayerLayout(text, pp).layout
    counted = [[len([k for k in chunk if k.name == "decoder"]) for chunk in r] for r in theirs]
    assert [[len(chunk) for chunk in rank] for rank in stage_layers(config)] == counted
