"""ascend-run's own step on the comparison's model, built as a run builds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks import llama36m as m


def overrides(precision: str) -> list[str]:
    """The comparison's model as config values."""
    return [
        "model.family=llama",
        f"model.num_layers={m.LAYERS}",
        f"model.hidden_size={m.HIDDEN}",
        f"model.ffn_hidden_size={m.FFN}",
        f"model.num_attention_heads={m.HEADS}",
        f"model.num_query_groups={m.HEADS}",
        f"model.vocab_size={m.VOCAB}",
        "data.train=never-read",  # batches are made here
        f"data.seq_length={m.SEQ_LENGTH}",
        f"train.micro_batch_size={m.MICRO_BATCH}",
        f"train.global_batch_size={m.MICRO_BATCH}",
        f"train.precision={precision}",
        f"optimizer.lr={m.LEARNING_RATE}",
        "optimizer.lr_decay_style=constant",
        "optimizer.weight_decay=0.0",
    ]


def train_step(precision: str, enable: Sequence[str] = ()) -> Callable[[int], float]:
    """A function of the step's number that trains one step and answers its loss.

    Args:
        enable: Features of the run.

    The context of the run stays open: the process ends with the measurement.
    """
    from ascend_run.core.hooks import Hooks
    from ascend_run.core.model.initialization import named_parameters
    from ascend_run.core.run import RunRequest, build_models, prepared_rank, seed_everything
    from ascend_run.core.train.step import TrainStep
    from ascend_run.entrypoints.planning import prepare
    from ascend_run.plugin_api import Batch

    prepared = prepare(None, overrides(precision), enable=enable)
    request = RunRequest(
        config=prepared.config,
        config_toml="",
        plugins=prepared.instances(),
        plan=prepared.plan,
        lock=prepared.lock,
    )
    rank = prepared_rank(request)
    hooks, context = rank.__enter__()
    assert isinstance(hooks, Hooks)
    task = hooks.require("ascend_task", config=prepared.config)
    seed_everything(prepared.config, context.layout)
    build_models(task, hooks, context, num_microbatches=1)
    bundle = context.models[task.roles[0]]
    state = m.weights()
    with torch.no_grad():
        for name, parameter in named_parameters(bundle.chunks[0].module):
            parameter.copy_(state.pop(name))
    assert not state, f"weights without a parameter: {sorted(state)}"
    bundle.optimizer.reload_model_params()
    step = TrainStep(context, task, hooks, task.roles[0])

    def run(index: int, *, keep_open: object = rank) -> float:
        tokens, labels = m.batch(index)
        tensors = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": torch.ones(tokens.shape),
            "position_ids": torch.arange(m.SEQ_LENGTH).expand_as(tokens),
        }
        return step(iter([Batch(tensors=tensors, fields=task.batch_fields)]), 1).loss

    return run
