"""Small token files, and the config of a run that reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import RunConfig
from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.text.indexed import IndexedWriter, dtype_for
from ascend_run.types.config import DataSection, RunSection
from tests.support.quiet_imports import import_quietly
from tests.support.tiny_configs import model_fields, parallel_fields

import_quietly("megatron.core.datasets.gpt_dataset")

WriteDataset = Callable[..., str]


@pytest.fixture
def write_dataset(tmp_path: Path) -> WriteDataset:
    """Return ``write_dataset(documents, name="data", vocab_size=100)`` -> prefix; without a
    record."""

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
    """Return ``run_config(seed=1, vocab_size=100, train=(prefix,), ...)``; other keys go to
    [data]."""

    def build(seed: int = 1, vocab_size: int | None = 100, **data: Any) -> RunConfig:
        return RunConfig(
            run=RunSection(output_dir=str(tmp_path / "run"), seed=seed),
            model=model_fields({"vocab_size": vocab_size}),
            parallel=parallel_fields(),
            data=DataSection(**data),
        )

    return build
