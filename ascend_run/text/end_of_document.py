"""The token that ends a document."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_run.plugin_api import DataError, RunConfig

from .sidecar import read_sidecar
from .tokenizer import load_tokenizer


def end_of_document(config: RunConfig, prefixes: Sequence[str]) -> int:
    """Return the id of the end-of-document token, from the tokenizer or a dataset's sidecar.

    Raises:
        DataError: Neither defines one.
    """
    if config.data.tokenizer is not None:
        eod = load_tokenizer(config.data.tokenizer).eod
        if eod is not None:
            return eod
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is not None and sidecar.eod is not None:
            return sidecar.eod
    raise DataError(
        "no end-of-document token is known, and this run needs it; name the tokenizer with "
        "data.tokenizer=PATH, or leave out what asks for it (data.eod_mask_loss, or a plugin)"
    )
