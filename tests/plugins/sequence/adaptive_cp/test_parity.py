"""Runs with a sequence partitioned by the mask, against the unsharded run."""

from __future__ import annotations

import pytest

from ascend_run.testing.parity import Parity

PLUGIN = "adaptive-cp"
WINDOW = {"model.window_size": [5, 0]}


@pytest.mark.needs_plugins("eod-reset")
def test_a_batch_of_documents_is_shared_by_them(parity: Parity) -> None:
    """The vocabulary is small, so that documents end in every sample."""
    parity(
        (PLUGIN, "eod-reset"),
        layout={"cp": 4},
        config={"model.vocab_size": 6},
        options={"plugins.eod-reset.eod_token_id": 1},
    )
