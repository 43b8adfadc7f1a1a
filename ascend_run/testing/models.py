"""Tiny models with grouped-query attention, gated MLPs and experts, which run in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ascend_run.types.layout import axis_settings

if TYPE_CHECKING:
    from torch import Tensor

_COMMON: Final = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.ffn_hidden_size": 48,
    "model.num_attention_heads": 8,
    "model.num_query_groups": 2,
    "model.init_method_std": 0.1,
    "model.vocab_size": 90,
    "model.make_vocab_size_divisible_by": 8,
    "data.seq_length": 16,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 4,
    "train.train_iters": 5,
    "train.precision": "fp32",
    "optimizer.lr": 1e-3,
    "optimizer.lr_warmup_iters": 1,
    # Large enough that rounding errors of gradients near zero are not scaled up to full steps, and
    # that a gradient of the wrong scale changes the size of the step.
    "optimizer.adam_eps": 1e-3,
    "run.seed": 17,
}

DENSE: Final[Mapping[str, object]] = {**_COMMON, "model.family": "llama"}
"""Two layers with grouped-query attention and a gated MLP; at most 80 thousand parameters."""

MOE: Final[Mapping[str, object]] = {
    **_COMMON,
    "model.family": "mixtral",
    "model.num_moe_experts": 4,
    "model.moe_router_topk": 2,
    "model.moe_ffn_hidden_size": 48,
    "model.moe_aux_loss_coeff": 0.01,
}
"""The same with four experts, two per token, and a load-balancing loss."""

END_OF_DOCUMENT: Final = 1
"""Token id that ends the documents of ``samples``."""

MODELS: Final[Mapping[str, Mapping[str, object]]] = {"dense": DENSE, "moe": MOE}


def trial_layout(sizes: Mapping[str, int]) -> dict[str, object]:
    """Return config key -> value for the layout of a trial.

    Tensor parallelism comes with sequence parallelism, which experts need and training uses.
    """
    split = sizes.get("tp", 1) > 1
    return axis_settings(sizes) | ({"parallel.sequence_parallel": True} if split else {})


def batch_of_steps(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, object]:
    """Return config key -> value of a smaller global batch for a trial's steps.

    Steps show the optimizer and what follows an update; that gradients of many micro-batches add up
    is shown by the gradients of the full global batch. One micro-batch is left per data-parallel
    rank and pipeline stage, and at least two.

    Args:
        config: Has ``train.micro_batch_size`` and ``train.global_batch_size``.
        sizes: The layout, as in ``trial_layout``.
    """
    num_microbatches = max(2, sizes.get("dp", 1) * sizes.get("pp", 1))
    smaller = config["train.micro_batch_size"] * num_microbatches
    return {"train.global_batch_size": min(smaller, config["train.global_batch_size"])}


def samples(config: Mapping[str, Any], count: int) -> list[dict[str, Tensor]]:
    """Return random sequences of a pretraining task: ``tokens``, ``labels``, ``loss_mask`` and
    ``position_ids``, each [S].

    They contain cases in which faults hide: the number of trained tokens differs between rows, and
    so between micro-batches and ranks; some rows have none, among them the last ones of a batch;
    others end with padding, or train a single token. Rows hold several documents, which end with
    the token ``END_OF_DOCUMENT`` and are of unequal lengths. A row depends on its index alone, so a
    longer dataset begins with a shorter one.

    Args:
        config: Has ``model.vocab_size`` and ``data.seq_length``.
    """
    import torch

    vocabulary, length = config["model.vocab_size"], config["data.seq_length"]
    generator = torch.Generator().manual_seed(5)
    made = []
    for index in range(count):
        text = torch.randint(vocabulary, (length + 1,), generator=generator)
        text[_ends_of_documents(index, length)] = END_OF_DOCUMENT
        mask = torch.ones(length)
        mask[_untrained(index, length)] = 0
        made.append(
            {
                "tokens": text[:-1],
                "labels": text[1:],
                "loss_mask": mask,
                "position_ids": torch.arange(length),
            }
        )
    return made


def _ends_of_documents(index: int, length: int) -> list[int]:
    """Positions of the last tokens of documents; one of them has a single token."""
    first = 2 + index % 3
    return [end for end in (first, first + 1, 3 * length // 4) if end < length]


def _untrained(index: int, length: int) -> list[int]:
    """Positions that are not trained. In every group of four rows the last one trains nothing, as
    in a batch that the dataset does not fill."""
    places = [*range(length)]
    kinds: tuple[list[int], ...] = (
        [],
        places[:3],  # a prompt
        places[1::3],
        places,
        places[-5:],  # padding
        [*places[: length // 2], length - 1],
        places[:-1] if index % 16 < 8 else places[1:],  # one trained token
        places,
    )
    return kinds[index % len(kinds)]
