"""Compare the logits of two stored models on the same tokens.

Each model is built as a run builds it, from its own config, on the CPU in float32 (float64 for such
weights), one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ascend_run.plugin_api.errors import ConfigError
from ascend_run.tools.convert.building import (
    built_model,
    compute_dtype,
    prepared_model,
    row_length,
)
from ascend_run.tools.convert.differences import Difference, difference
from ascend_run.tools.convert.formats.model_source import ModelSource, Progress

from .comparison import Comparison

SEQUENCES: Final = 2
MAX_LENGTH: Final = 128
_SEED: Final = 1234
_ADVICE: Final = "compare the tensors instead, with --verify tensors"


def require_buildable(source: ModelSource) -> None:
    """
    Raises:
        ConfigError: No run can have this model, or it is larger than the free memory.
    """
    import psutil

    prepared_model(source, _refusal(source))
    width = compute_dtype(source).itemsize
    needed = sum(header.numel() * width for header in source.headers.values())
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"--verify logits builds the model in {needed / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free; {_ADVICE}"
        )


def compare_logits(
    source: ModelSource, targets: Mapping[str, ModelSource], progress: Progress
) -> Comparison:
    """Compare the logits of random tokens, bit for bit.

    Args:
        targets: What was written, by how it was opened.

    Raises:
        ConfigError: A model cannot be built from its config.
    """
    length, vocab_size = min(MAX_LENGTH, row_length(source)), source.config.model.vocab_size
    generator = torch.Generator().manual_seed(_SEED)
    tokens_BS = torch.randint(vocab_size, (SEQUENCES, length), generator=generator)
    want = logits_of(source, tokens_BS)
    found: dict[str, Difference] = {}
    for number, (name, target) in enumerate(targets.items(), start=1):
        progress("verify", number, len(targets) + 1)
        if (one := difference(want, logits_of(target, tokens_BS))) is not None:
            found[name] = one
    progress("verify", 1, 1)
    return Comparison(
        kind="logits",
        compared=want.numel() * len(targets),
        different={name: one.text for name, one in found.items()},
        max_difference=max((one.largest for one in found.values()), default=0.0),
    )


def logits_of(source: ModelSource, tokens_BS: Tensor) -> Tensor:
    """Return the logits [B, S, V] of a stored model."""
    with built_model(source, compute_dtype(source), refusal=_refusal(source)) as model:
        positions = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        result: Tensor = model(tokens_BS, positions)
        return result.clone()


def _refusal(source: ModelSource) -> str:
    return f"the logits of {source.folder} cannot be computed; {_ADVICE}"
