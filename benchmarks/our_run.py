"""A training step of ascend-run on the model of the comparison, built as in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import llama


def overrides(shape: llama.Shape, precision: str) -> list[str]:
    """Return the model of the comparison as config values."""
    experts = [
        f"model.num_moe_experts={shape.experts}",
        f"model.moe_router_topk={shape.topk}",
        f"model.moe_ffn_hidden_size={shape.ffn}",
        "model.moe_router_load_balancing_type=none",
        "model.rotary_base=10000",
    ]
    return [
        *(experts if shape.experts else ()),
        f"model.family={'mixtral' if shape.experts else 'llama'}",
        f"model.num_layers={shape.layers}",
        f"model.hidden_size={shape.hidden}",
        f"model.ffn_hidden_size={shape.ffn}",
        f"model.num_attention_heads={shape.heads}",
        f"model.num_query_groups={shape.heads}",
        f"model.vocab_size={shape.vocab}",
        "data.train=never-read",  # batches are made here
        f"data.seq_length={shape.seq_length}",
        f"train.micro_batch_size={shape.micro_batch}",
        f"train.global_batch_size={shape.micro_batch}",
        f"train.precision={precision}",
        f"optimizer.lr={llama.LEARNING_RATE}",
        "optimizer.lr_decay_style=constant",
        "optimizer.weight_decay=0.0",
    ]


def values(shape: llama.Shape, precision: str) -> dict[str, Any]:
    """Return ``overrides`` as values, but for the data."""
    from ascend_run.prepare.config.reading import read_raw

    given = read_raw(None, overrides(shape, precision)).values
    return {key: one.value for key, one in given.items() if key != "data.train"}


@contextmanager
def training(
    shape: llama.Shape,
    precision: str,
    device: str = "cpu",
    enable: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Iterator[Callable[[int], float]]:
    """Return a function of the step index that trains one step and returns its loss.

    Args:
        device: ``cpu`` or ``cuda``, which is the platform too.
        enable: Features of the run.
        options: Config values beside those of the comparison, as ``name=value``.
    """
    from ascend_run.core.model.initialization import named_parameters
    from ascend_run.core.run import prepared_rank
    from ascend_run.core.train.seeding import seed_everything
    from ascend_run.plugin_api import Batch
    from ascend_run.prepare.prepare import prepare
    from ascend_run.testing.dry_run import DryRun

    given = [*overrides(shape, precision), *options]
    prepared = prepare(None, given, enable=enable, platform=device)
    with prepared_rank(prepared.run_request()) as (hooks, context):
        seed_everything(prepared.config, context.layout)
        dry_run = DryRun(hooks, context)
        dry_run.build()
        bundle, fields = dry_run.bundle, dry_run.task.batch_fields
        state = llama.weights(shape)
        with torch.no_grad():
            for name, parameter in named_parameters(bundle.chunks[0].module):
                parameter.copy_(state.pop(name))
        assert not state, f"weights without a parameter: {sorted(state)}"
        bundle.optimizer.reload_model_params()
        step = dry_run.train_step()

        def run(index: int) -> float:
            tokens, labels = llama.batch(shape, index, device)
            tensors = {
                "tokens": tokens,
                "labels": labels,
                "loss_mask": torch.ones(tokens.shape, device=device),
                "position_ids": torch.arange(shape.seq_length, device=device).expand_as(tokens),
            }
            return step(iter([Batch(tensors=tensors, fields=fields)]), 1).loss

        yield run
