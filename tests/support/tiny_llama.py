"""A tiny Llama saved by transformers, and AdamW steps on it by transformers and torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

OPTIMIZER: Final = {
    "optimizer.lr": 1e-3,
    "optimizer.lr_decay_style": "constant",
    "optimizer.weight_decay": 0.1,
    "optimizer.adam_beta2": 0.95,
    # Large enough that rounding a near-zero gradient does not cause a step of full size.
    "optimizer.adam_eps": 1e-4,
    "optimizer.clip_grad": 1.0,
}
"""Used by both sides."""


def write_llama(folder: Path, vocab_size: int = 400, seed: int = 0, **changes: Any) -> str:
    """Write a random model with grouped-query attention as a Hugging Face folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            **changes,
        }
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return str(folder)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """Return torch's optimizer with the settings of ``OPTIMIZER``."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-4,
    )


def train_reference(
    model: nn.Module,
    batches: Sequence[Sequence[tuple[list[int], list[bool]]]],
    mask_of: Callable[[list[bool]], Tensor | None] = lambda trained: None,
) -> Iterator[float]:
    """Return losses of AdamW steps, one per global batch; each sample is run separately.

    Args:
        batches: Samples as token ids and which of them are trained.
        mask_of: Converts the latter to transformers' ``attention_mask``.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adamw(parameters)
    for batch in batches:
        losses: list[Tensor] = []
        for ids, trained in batch:
            mask = mask_of(trained)
            logits = model(input_ids=torch.tensor([ids]), attention_mask=mask).logits[0, :-1]
            each = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            losses.append(each[torch.tensor(trained[1:])])
        loss = torch.cat(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield float(loss.detach())
