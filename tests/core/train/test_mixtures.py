"""Layouts drawn by chance from all that are not refused: the loss and gradients of one rank."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from ascend_run.plugin_api.errors import ConfigError
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import prepare

from .trials import EXCHANGE, assert_same, outcomes

COUNT = 10
SEED = 3
BATCH = {"train.global_batch_size": 8, "model.num_layers": 4}
MODELS = {
    "dense": {**DENSE, **BATCH},
    "tied": {**DENSE, **BATCH, "model.share_embeddings_and_output_weights": True},
    # A balancing loss is one of a micro-batch, and these split the batch in different ways.
    "moe": {**MOE, **BATCH, "model.moe_aux_loss_coeff": 0.0, "model.moe_layer_freq": [0, 1, 1, 0]},
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "parallel.tensor_model_parallel_size": (1, 2),
    "parallel.pipeline_model_parallel_size": (1, 2, 4),
    "parallel.virtual_pipeline_model_parallel_size": (None, None, 2),
    "parallel.context_parallel_size": (1, 1, 2),
    "parallel.expert_model_parallel_size": (1, 2),
    "parallel.expert_tensor_parallel_size": (1, 2),
    "parallel.batch_p2p_comm": (True, False),
    "model.num_layers_in_first_pipeline_stage": (None, None, 1),
    "model.moe_token_dispatcher_type": ("alltoall", "allgather"),
    "train.micro_batch_size": (1, 2, 4),
    "ddp.use_distributed_optimizer": (False, True),
    "ddp.overlap_grad_reduce": (False, True),
}
OF_A_REPLICA = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
)


def mixtures() -> Iterator[tuple[str, int, dict[str, Any], tuple[str, ...]]]:
    """Model, ranks, layout and plugins of each."""
    chance = random.Random(SEED)
    while True:
        model, ranks = chance.choice([*MODELS]), chance.choice((2, 4, 4))
        layout = {key: chance.choice(values) for key, values in CHOICES.items()}
        layout["parallel.sequence_parallel"] = layout["parallel.tensor_model_parallel_size"] > 1
        layout = {key: value for key, value in layout.items() if value is not None}
        axes = [key for key in layout if key.endswith("_size") and key.startswith("parallel.")]
        plugins = EXCHANGE if layout["parallel.context_parallel_size"] > 1 else ()
        if layout["parallel.context_parallel_size"] > 1 and not EXCHANGE:
            continue
        if sum(layout[key] > 1 for key in axes) < 2:
            continue  # the plain ones have tests of their own
        if ranks % math.prod(layout.get(key, 1) for key in OF_A_REPLICA):
            continue  # refused, too, but at once
        try:
            prepare({**MODELS[model], **layout}, plugins, ranks)
        except ConfigError:
            continue
        yield model, ranks, layout, plugins


def _drawn() -> list[Any]:
    found = mixtures()
    cases = []
    for _ in range(COUNT):
        model, ranks, layout, plugins = next(found)
        shown = [
            f"{''.join(word[0] for word in key.partition('.')[2].split('_'))}={value}"
            for key, value in layout.items()
            if value not in (1, False, True, "alltoall")
        ]
        cases.append(
            pytest.param(model, ranks, layout, plugins, id=f"{model} {ranks} {' '.join(shown)}")
        )
    return cases


@pytest.mark.exhaustive(by=lambda model, plugins: (model, *plugins))
@pytest.mark.parametrize(("model", "ranks", "layout", "plugins"), _drawn())
def test_a_mixture_of_layouts_has_the_gradients_of_one_rank(
    gloo_pool: GlooPool, model: str, ranks: int, layout: dict[str, Any], plugins: tuple[str, ...]
) -> None:
    values = MODELS[model]
    whole = outcomes(gloo_pool, {**values, "train.micro_batch_size": 8}, 1)
    assert_same(outcomes(gloo_pool, {**values, **layout}, ranks, plugins), whole)
