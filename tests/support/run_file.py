"""A config file of a run on two ranks, with a third-party feature."""

from __future__ import annotations

from pathlib import Path

import pytest

from .installed import Install, offer

CONFIG = """
enable = ["relay"]

[run]
nproc = 2

[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
vocab_size = 1000

[parallel]
context_parallel_size = 2

[data]
train = ["corpus"]
seq_length = 64

[train]
global_batch_size = 2
"""

RELAY = """
from ascend_run.plugin_api import Condition, Manifest, hookimpl

class Halves:
    multiple = 1

class Plugin:
    manifest = Manifest(
        name="relay",
        summary="hand the sequence on",
        idle=Condition("parallel.context_parallel_size", "<=", 1),
    )

    @hookimpl
    def ascend_sequence_partition(self):
        return Halves()
"""


@pytest.fixture
def file(install: Install, tmp_path: Path) -> Path:
    """Write the file; its feature is installed until the test ends."""
    offer(install, "relay", RELAY)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path
