"""The fields of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ascend_run.plugin_api import BatchField


def fields_of_tokens(*names: str) -> Mapping[str, BatchField]:
    """Return fields with a value for each token, [B, S]."""
    return MappingProxyType({name: BatchField(axes=("batch", "sequence")) for name in names})


TOKEN_FIELDS: Final = fields_of_tokens("tokens", "labels", "loss_mask", "position_ids")
"""Of a language model."""
DOCUMENT_FIELDS: Final = fields_of_tokens(*TOKEN_FIELDS, "documents")
"""Of rows of several documents, which do not attend to each other."""
