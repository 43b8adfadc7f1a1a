"""The score head of an adapter in PEFT's format, beside a base that predicts tokens.

PEFT's models for ``SEQ_CLS`` train the head in full, so their bases need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ascend_run.core.hugging_face.parameter_rows import EMBEDDING, SCORE
from ascend_run.tools.convert.formats.model_source import ModelSource

_STORED: Final = f"base_model.model.{SCORE}"


def num_labels(tensors: Path) -> int | None:
    """Return the labels of the head in an adapter's file of tensors; None if it has none, or if it
    cannot be read, which is reported where it is merged."""
    try:
        with safe_open(tensors, framework="pt") as stored:
            if _STORED not in [*stored.keys()]:
                return None
            return int(stored.get_slice(_STORED).get_shape()[0])
    except (SafetensorError, OSError):
        return None


def with_own_head(
    source: ModelSource, shapes: Mapping[str, tuple[int, ...]], stored: Callable[[str], Tensor]
) -> ModelSource:
    """Return a model with a head where it lacks one: the adapter's, in the dtype of the embedding.

    Args:
        shapes: Name in PEFT's file -> shape.
        stored: Reads a tensor of the file.
    """
    if not source.config.model.num_labels or SCORE in source.headers or _STORED not in shapes:
        return source
    dtype = source.headers[EMBEDDING].dtype
    head = torch.empty(shapes[_STORED], dtype=dtype, device="meta")

    def read(name: str) -> Tensor:
        if name != SCORE:
            return source.tensor(name)
        return stored(_STORED).to(dtype)

    return attrs.evolve(source, headers={**source.headers, SCORE: head}, read=read)
