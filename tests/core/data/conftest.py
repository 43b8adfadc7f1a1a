"""Small token files, and the config of a run that reads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.data.indexed import IndexedWriter, bin_path, dtype_for, idx_path
from ascend_run.plugin_api import FieldSection, RunConfig
from ascend_run.plugin_api.config import DataSection, RunSection

# Megatron and what it imports warn of what they deprecate or miss, once, when first imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.datasets.gpt_dataset  # noqa: F401

WriteDataset = Callable[..., str]


@pytest.fixture
def write_dataset(tmp_path: Path) -> WriteDataset:
    """``write_dataset(documents, name="data", vocab_size=100)`` -> prefix; without a record."""

    def write(documents: Sequence[Sequence[int]], name: str = "data", vocab_size: int = 100) -> str:
        prefix = str(tmp_path / name)
        with bin_path(prefix).open("wb") as stream:
            writer = IndexedWriter(stream, dtype_for(vocab_size))
            for document in documents:
                writer.add(document)
        idx_path(prefix).write_bytes(writer.index())
        return prefix

    return write


@pytest.fixture
def run_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """``run_config(seed=1, vocab_size=100, train=(prefix,), ...)``; the rest goes to [data]."""

    def build(seed: int = 1, vocab_size: int | None = 100, **data: Any) -> RunConfig:
        return RunConfig(
            run=RunSection(output_dir=str(tmp_path / "run"), seed=seed),
            model=FieldSection({"vocab_size": vocab_size}),
            parallel=FieldSection({}),
            data=DataSection(**data),
        )

    return build
