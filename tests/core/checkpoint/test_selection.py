"""Which checkpoint a run resumes from: never a silent restart, never a silent loss."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from ascend_run.core.checkpoint import FileStore, choose
from ascend_run.plugin_api import CheckpointError

from .tensors import save_two_tensors
from .thread_ranks import all_ranks


def store_with(folder: Path, steps: Iterable[int], corrupt: Iterable[int] = ()) -> FileStore:
    for step in steps:
        save_two_tensors(folder, step)
    for step in corrupt:
        shard = folder / f"step_{step:08d}" / "rank_0000.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    return FileStore(folder)


def test_the_newest_valid_checkpoint_is_chosen(tmp_path: Path) -> None:
    choice = choose(store_with(tmp_path, [1, 2, 3]))
    assert (choice.step, choice.corrupt, choice.newer) == (3, (), ())


def test_an_empty_or_missing_folder_means_a_fresh_start(tmp_path: Path) -> None:
    assert choose(FileStore(tmp_path)).step is None
    assert choose(FileStore(tmp_path / "none")).step is None


def test_an_empty_folder_that_was_named_to_load_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint to load"):
        choose(FileStore(tmp_path), required=True)


def test_corrupt_newer_ones_are_passed_over_and_named(tmp_path: Path) -> None:
    choice = choose(store_with(tmp_path, [1, 2, 3], corrupt=[2, 3]), max_fallback=2)
    assert choice.step == 1
    assert [bad.step for bad in choice.corrupt] == [3, 2]
    assert "tensor 'model/a'" in choice.corrupt[0].reason


def test_falling_back_is_bounded(tmp_path: Path) -> None:
    store = store_with(tmp_path, [1, 2, 3], corrupt=[2, 3])
    with pytest.raises(CheckpointError, match="max_fallback=1") as caught:
        choose(store, max_fallback=1)
    assert "available: 1, 2, 3" in str(caught.value)
    assert "step 3: " in str(caught.value)
    assert "step 2: " in str(caught.value)
    with pytest.raises(CheckpointError, match="max_fallback=0"):
        choose(store, max_fallback=0)


def test_only_corrupt_ones_are_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        choose(store_with(tmp_path, [1, 2], corrupt=[1, 2]), max_fallback=9)


def test_a_step_asked_for_by_number_is_that_step_or_an_error(tmp_path: Path) -> None:
    store = store_with(tmp_path, [1, 2, 3], corrupt=[2])
    choice = choose(store, 1)
    assert (choice.step, choice.newer) == (1, (2, 3))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; available: 1, 2, 3"):
        choose(store, 7)
    with pytest.raises(CheckpointError, match="step_00000002 is corrupt"):
        choose(store, 2)


def test_all_ranks_choose_alike(tmp_path: Path) -> None:
    store_with(tmp_path, [1, 2], corrupt=[2])
    choices = all_ranks(3, lambda ranks: choose(FileStore(tmp_path, ranks=ranks)))
    assert [choice.step for choice in choices] == [1, 1, 1]
    assert len({choice.corrupt for choice in choices}) == 1
