"""Rules for which layer slots may stay empty. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_run.plugin_api import Layout, RunConfig

_OPTION = "plugins.noop-layers.layers"
_UNEVEN = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def problems(empty: Sequence[int], config: RunConfig, layout: Layout) -> list[str]:
    """Return one sentence for each problem with the empty layer slots."""
    places = config.model.num_layers
    shown = f"noop-layers: {_OPTION}={list(empty)}"
    if not empty:
        return [f"{shown} names no layer slot; name one, or leave noop-layers out"]
    found = []
    if outside := sorted({place for place in empty if not 0 <= place < places}):
        found.append(
            f"{shown} names {', '.join(map(str, outside))}; expected layer slots 0 to "
            f"{places - 1}, as model.num_layers={places} counts the empty ones too"
        )
    if twice := sorted({place for place in empty if empty.count(place) > 1}):
        found.append(f"{shown} names {', '.join(map(str, twice))} twice; name it once")
    if not found and len(empty) == places:
        found.append(f"{shown} leaves no layer of model.num_layers={places}; name fewer slots")
    if not found:
        found += _ranks_without_layers(shown, empty, config, layout)
    return found


def _ranks_without_layers(
    shown: str, empty: Sequence[int], config: RunConfig, layout: Layout
) -> Iterator[str]:
    """Yield a problem for each inner pipeline rank without parameters.

    The first and the last rank hold the embedding and the output layer.
    """
    stages = layout.pp * (layout.vpp or 1)
    if any(config.model[name] for name in _UNEVEN) or config.model.num_layers % stages:
        return
    each = config.model.num_layers // stages
    for rank in range(1, layout.pp - 1):
        held = [
            place
            for stage in range(rank, stages, layout.pp)
            for place in range(stage * each, (stage + 1) * each)
        ]
        if set(held) <= set(empty):
            yield (
                f"{shown} leaves pipeline rank {rank} of {layout.pp} without a parameter (it has "
                f"slots {', '.join(map(str, held))}); leave a layer there"
            )
