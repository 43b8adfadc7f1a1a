"""Shares and order of a blend, and which datasets of a task are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascend_run.core.data.index_cache import IndexCache
from ascend_run.core.data.samples import BlendedSamples, build_datasets
from ascend_run.plugin_api import Datasets, HookError, PlatformError, RunConfig, SampleBlend

MakeConfig = Callable[..., RunConfig]


class Numbered:
    """A dataset whose items have its number and their own."""

    def __init__(self, number: int, length: int) -> None:
        self._number = number
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"source": torch.tensor(self._number), "item": torch.tensor(index)}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.floats(0.01, 10.0), min_size=2, max_size=5),
    st.integers(1, 400),
)
def test_a_blend_keeps_its_shares_to_within_one_sample_at_every_point(
    tmp_path: Path, weights: list[float], samples: int
) -> None:
    sources = [Numbered(n, samples) for n in range(len(weights))]
    blend = BlendedSamples(sources, weights, samples, IndexCache(tmp_path / "cache"))
    drawn = np.zeros(len(weights))
    share = np.array(weights) / np.sum(weights)
    for index in range(samples):
        sample = blend[index]
        source = int(sample["source"])
        assert sample["item"] == drawn[source]  # each source from its first item on
        drawn[source] += 1
        assert np.all(np.abs(drawn - share * (index + 1)) < len(weights))


def test_a_blend_ends_where_it_was_asked_to(run_config: MakeConfig) -> None:
    for sources in (1, 2):
        blend = SampleBlend(datasets=(Numbered(0, 5),) * sources, weights=(1.0,) * sources)
        train = build_datasets(run_config(), Datasets(blend, None), 5, 0).train
        assert len(train) == 5
        assert train[4]["item"] == (4 if sources == 1 else 2)
        with pytest.raises(IndexError, match="sample 5 of 5"):
            train[5]


def test_a_tasks_own_dataset_passes_through(run_config: MakeConfig) -> None:
    own = [{"tokens": torch.zeros(4)}]
    built = build_datasets(run_config(), Datasets(own, None), 1, 0)
    assert built.train is own
    assert built.validation is None


def test_a_task_without_training_data_is_refused_where_steps_are_left(
    run_config: MakeConfig,
) -> None:
    nothing = Datasets(train=None, validation=None)
    with pytest.raises(HookError, match=r"'pretrain' returned no training dataset.* 10 samples"):
        build_datasets(run_config(), nothing, 10, 0)
    assert build_datasets(run_config(), nothing, 0, 0).train is None


def test_blending_without_the_compiled_helpers_is_rejected(
    run_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to install."""
    import sys

    import megatron.core.datasets

    monkeypatch.delattr(megatron.core.datasets, "helpers", raising=False)
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers", None)
    both = SampleBlend(datasets=(Numbered(0, 5), Numbered(1, 5)), weights=(1.0, 1.0))
    with pytest.raises(PlatformError, match="compiled helpers"):
        build_datasets(run_config(), Datasets(both, None), 5, 0)
    alone = SampleBlend(datasets=(Numbered(0, 5),), weights=(1.0,))
    assert build_datasets(run_config(), Datasets(alone, None), 5, 0).train[4]["item"] == 4
