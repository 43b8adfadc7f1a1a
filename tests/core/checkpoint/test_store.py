"""FileStore: what is saved comes back, in any layout, and nothing half-written is published."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ascend_run.core.checkpoint import FileStore, layout_sizes
from ascend_run.core.checkpoint.boxes import Box, boxes_of_range
from ascend_run.core.checkpoint.shard_file import DTYPE_NAMES
from ascend_run.plugin_api import CheckpointError, Layout, StorageError, TensorShard

from .tensors import blank, full_shard, load_two_tensors, numbers, part, rows, save_two_tensors
from .thread_ranks import ThreadRanks, all_ranks, on_ranks


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    drawn = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 4 * dtype.itemsize)).byte()
    shards = [
        full_shard("matrix", drawn.view(dtype)),
        full_shard("scalar", drawn.view(dtype)[0, 0].clone()),
        full_shard("empty", torch.empty(0, 5, dtype=dtype)),
    ]
    FileStore(tmp_path).save(1, shards, {})
    loaded = [blank(shard) for shard in shards]
    FileStore(tmp_path).load(1, loaded)
    for before, after in zip(shards, loaded, strict=True):
        assert before.tensor.reshape(-1).view(torch.uint8).tolist() == (
            after.tensor.reshape(-1).view(torch.uint8).tolist()
        )


def test_strided_tensors_are_saved_and_filled_in_place(tmp_path: Path) -> None:
    tensor = numbers(6, 8)
    FileStore(tmp_path).save(1, [full_shard("t", tensor.t()[::2])], {})
    memory = torch.zeros(6, 8)
    FileStore(tmp_path).load(1, [full_shard("t", memory.t()[::2])])
    assert torch.equal(memory.t()[::2], tensor.t()[::2])
    assert memory.t()[1::2].eq(0).all()


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}, "d": 2**60, "e": 0.1 + 0.2, "ü": "é"}
    FileStore(tmp_path).save(1, [], values)
    assert FileStore(tmp_path).load(1, []) == values


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"deep": [1, {"x": torch.ones(1)}]}, "values.key.deep[1].x: Tensor"),
        ((1, 2), "values.key: tuple"),
        (float("nan"), "values.key: nan"),
        ({1: "a"}, "values.key: the key 1"),
        (b"bytes", "values.key: bytes"),
    ],
    ids=["tensor", "tuple", "nan", "key", "bytes"],
)
def test_a_value_that_is_not_json_is_refused_by_name(
    tmp_path: Path, value: object, name: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        FileStore(tmp_path).save(1, [], {"good": 1, "key": value})
    assert name in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_any_layout_loads_what_any_other_saved(
    tmp_path: Path, writers: int, readers: int, axis: int
) -> None:
    tensor = numbers(8, 12)

    def shards(rank: int, size: int, cut: int) -> list[TensorShard]:
        each = tensor.shape[cut] // size
        offset, shape = [0, 0], list(tensor.shape)
        offset[cut], shape[cut] = rank * each, each
        replicated = part("everywhere", numbers(3), (0,), (3,), writes=rank == 0)
        return [part("cut", tensor, offset, shape), replicated]

    def save(ranks: ThreadRanks) -> str:
        return FileStore(tmp_path, ranks=ranks).save(
            1, shards(ranks.rank, ranks.size, axis), {"x": 1}
        )

    def load(ranks: ThreadRanks) -> tuple[list[TensorShard], object]:
        blanks = [blank(shard) for shard in shards(ranks.rank, ranks.size, 1 - axis)]
        values = FileStore(tmp_path, ranks=ranks).load(1, blanks)
        return blanks, values

    assert len(set(all_ranks(writers, save))) == 1
    for rank, (loaded, values) in enumerate(all_ranks(readers, load)):
        assert values == {"x": 1}
        for before, after in zip(shards(rank, readers, 1 - axis), loaded, strict=True):
            assert torch.equal(before.tensor, after.tensor)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut at random: into flat ranges, or axis by axis."""
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, math.prod(shape)), max_size=3)))
        edges = [0, *cuts, math.prod(shape)]
        return [b for a, z in itertools.pairwise(edges) for b in boxes_of_range(shape, a, z)]
    boxes = [Box((), ())]
    for length in shape:
        cuts = sorted(draw(st.sets(st.integers(1, length), max_size=2)) | {0, length})
        boxes = [
            Box((*box.offset, a), (*box.shape, z - a))
            for box in boxes
            for a, z in itertools.pairwise(cuts)
        ]
    return boxes


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_tilings_of_random_tensors_round_trip(tmp_path: Path, data: st.DataObject) -> None:
    num_writers, num_readers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    tensors: dict[str, torch.Tensor] = {}
    written: list[list[TensorShard]] = [[] for _ in range(num_writers)]
    read: list[list[TensorShard]] = [[] for _ in range(num_readers)]
    for i in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        tensors[f"t{i}"] = tensor = numbers(*shape, dtype=dtype, start=i)
        for place, num in ((written, num_writers), (read, num_readers)):
            for box in data.draw(tilings(shape)):
                owner = data.draw(st.integers(0, num - 1))
                place[owner].append(part(f"t{i}", tensor, box.offset, box.shape))
    step = len(list(tmp_path.iterdir())) + 1
    all_ranks(
        num_writers,
        lambda ranks: FileStore(tmp_path, keep_last=0, ranks=ranks).save(
            step, written[ranks.rank], {}
        ),
    )
    blanks = [[blank(shard) for shard in shards] for shards in read]
    all_ranks(
        num_readers,
        lambda ranks: FileStore(tmp_path, ranks=ranks).load(step, blanks[ranks.rank]),
    )
    for wanted, got in zip(read, blanks, strict=True):
        assert all(torch.equal(w.tensor, g.tensor) for w, g in zip(wanted, got, strict=True))


@pytest.mark.parametrize(
    ("shards", "named"),
    [
        ([[("t", (0, 0), (2, 6))], [("t", (3, 0), (5, 6))]], "t: 6 of 48 elements"),
        ([[("t", (0, 0), (5, 6))], [("t", (3, 0), (5, 6))]], "t: the shard of shape [5, 6] at [0"),
        ([[("t", (0, 0), (8, 6))], [("t", (0, 0), (8, 6))]], "t: the shard of shape [8, 6]"),
        ([[("t", (0, 0), (8, 6)), ("t", (0, 0), (8, 6))], []], "t: written twice"),
    ],
    ids=["gap", "overlap", "replica", "twice on one rank"],
)
def test_shards_that_do_not_tile_their_tensor_are_rejected(
    tmp_path: Path, shards: list[list[tuple[str, tuple[int, int], tuple[int, int]]]], named: str
) -> None:
    """The error is raised before anything is written."""
    tensor = numbers(8, 6)

    def save(ranks: ThreadRanks) -> object:
        own = [part(key, tensor, offset, shape) for key, offset, shape in shards[ranks.rank]]
        return FileStore(tmp_path, ranks=ranks).save(1, own, {})

    for error in on_ranks(2, save):
        assert isinstance(error, CheckpointError)
        assert named in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_no_rank_writes_is_refused(tmp_path: Path) -> None:
    shard = part("t", numbers(4), (0,), (4,), writes=False)
    with pytest.raises(CheckpointError, match="t: 4 of 4 elements are written by no rank"):
        FileStore(tmp_path).save(1, [shard], {})


def test_ranks_that_disagree_on_a_value_or_a_dtype_are_refused(tmp_path: Path) -> None:
    def save(ranks: ThreadRanks) -> object:
        tensor = numbers(4, 2, dtype=[torch.float32, torch.float64][ranks.rank])
        shard = rows("t", tensor, ranks.rank, 2)
        return FileStore(tmp_path, ranks=ranks).save(1, [shard], {"same": 1, "who": ranks.rank})

    for error in on_ranks(2, save):
        assert "rank 1 has different values than rank 0: who" in str(error)
        assert "F64" in str(error)


def test_loading_lists_all_mismatches_of_all_ranks_at_once(tmp_path: Path) -> None:
    saved = {"kept": numbers(4), "shape": numbers(4), "dtype": numbers(4), "left": numbers(2)}
    FileStore(tmp_path).save(1, [full_shard(k, t) for k, t in saved.items()], {})

    def load(ranks: ThreadRanks) -> object:
        own = [
            [full_shard("missing", torch.zeros(4)), full_shard("kept", torch.zeros(4))],
            [full_shard("shape", torch.zeros(5)), full_shard("dtype", torch.zeros(4).double())],
        ][ranks.rank]
        return FileStore(tmp_path, ranks=ranks).load(1, own)

    for error in on_ranks(2, load):
        assert isinstance(error, CheckpointError)
        assert "rank 0: missing: the checkpoint does not have it" in str(error)
        assert "rank 1: shape: the checkpoint has shape [4], this run [5]" in str(error)
        assert "rank 1: dtype: the checkpoint has dtype F32, this run F64" in str(error)


def test_many_mismatches_are_listed_up_to_a_limit_and_counted(tmp_path: Path) -> None:
    FileStore(tmp_path).save(1, [full_shard(f"old{i:02}", numbers(1)) for i in range(30)], {})
    for wanted, first in (([], "old00"), ([f"new{i:02}" for i in range(30)], "new00")):
        with pytest.raises(CheckpointError) as refused:
            FileStore(tmp_path).load(1, [full_shard(key, torch.zeros(1)) for key in wanted])
        assert len(refused.value.problems) == 21
        assert refused.value.problems[0].startswith(f"{first}: ")
        assert refused.value.problems[-1] == "and 10 more"


def test_an_unused_tensor_is_an_error_unless_ignored(tmp_path: Path) -> None:
    shards = [full_shard("model/a", numbers(2)), full_shard("rng/rank_00001/torch", numbers(2))]
    FileStore(tmp_path).save(1, shards, {})
    wanted = [blank(shards[0])]
    problem = "rng/rank_00001/torch: in the checkpoint, but not used by this run"
    with pytest.raises(CheckpointError, match=problem):
        FileStore(tmp_path).load(1, wanted)
    assert wanted[0].tensor.eq(7).all()
    FileStore(tmp_path).load(1, wanted, ignore_unused=["rng/*"])
    assert torch.equal(wanted[0].tensor, shards[0].tensor)


def test_only_the_newest_are_kept_and_zero_keeps_all(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save_two_tensors(tmp_path / "two", step, keep_last=2)
        save_two_tensors(tmp_path / "all", step, keep_last=0)
    assert FileStore(tmp_path / "two").steps() == [3, 10]
    assert FileStore(tmp_path / "all").steps() == [1, 2, 3, 10]
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == [
        "step_00000003",
        "step_00000010",
    ]


def test_a_corrupt_checkpoint_does_not_count_as_one_to_keep(tmp_path: Path) -> None:
    save_two_tensors(tmp_path, 1)
    save_two_tensors(tmp_path, 2)
    (tmp_path / "step_00000002" / "rank_0000.safetensors").write_bytes(b"")
    save_two_tensors(tmp_path, 3, keep_last=2)
    assert FileStore(tmp_path).steps() == [1, 2, 3]
    save_two_tensors(tmp_path, 4, keep_last=2)
    assert FileStore(tmp_path).steps() == [3, 4]


def test_saving_after_going_back_removes_no_later_checkpoint(
    tmp_path: Path,
) -> None:
    """Nor does the save remove itself."""
    for step in (1, 8, 9):
        save_two_tensors(tmp_path, step)
    save_two_tensors(tmp_path, 2, keep_last=1)
    assert FileStore(tmp_path).steps() == [2, 8, 9]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_two_tensors(tmp_path, 5)
    FileStore(tmp_path).save(5, [full_shard("other", numbers(2))], {"new": True})
    assert FileStore(tmp_path).steps() == [5]
    assert FileStore(tmp_path).load(5, [full_shard("other", torch.zeros(2))]) == {"new": True}
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_dead_run_left_is_not_listed_and_goes_at_the_next_save(tmp_path: Path) -> None:
    saved = save_two_tensors(tmp_path, 1)
    hidden = tmp_path / ".step_00000002.tmp-0badcafe"
    hidden.mkdir()
    (hidden / "rank_0000.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("a file of the user's own")
    assert FileStore(tmp_path).steps() == [1]
    save_two_tensors(tmp_path, 3)
    assert not hidden.exists()
    assert (tmp_path / "notes.txt").exists()
    assert torch.equal(load_two_tensors(tmp_path, 1)["model/a"], saved["model/a"])


def test_one_that_was_being_replaced_by_a_dead_run_is_still_there(tmp_path: Path) -> None:
    saved = save_two_tensors(tmp_path, 1)
    (tmp_path / "step_00000001").rename(tmp_path / ".step_00000001.old-0badcafe")
    assert FileStore(tmp_path).steps() == [1]
    assert torch.equal(load_two_tensors(tmp_path, 1)["model/a"], saved["model/a"])
    save_two_tensors(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_a_folder_that_does_not_exist_holds_no_checkpoint(tmp_path: Path) -> None:
    assert FileStore(tmp_path / "none").steps() == []
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 in .*; available: none"):
        FileStore(tmp_path / "none").load(3, [])


def test_the_manifest_says_which_layout_and_versions_wrote_it(tmp_path: Path) -> None:
    layout = Layout(world_size=4, tp=2, rank=1)
    store = FileStore(tmp_path, layout=layout)
    store.save(1, [full_shard("t", numbers(2))], {})
    manifest = store.manifest(1)
    assert manifest.layout["world_size"] == 4
    assert (manifest.layout["tp"], manifest.layout["dp"]) == (2, 2)
    assert store.layout(1) == layout_sizes(Layout(world_size=4, tp=2, rank=3))
    assert store.layout(1) != layout_sizes(Layout(world_size=4, rank=1))
    assert set(manifest.versions) == {"ascend-run", "megatron-core", "torch"}
    content = json.loads((tmp_path / "step_00000001" / "manifest.json").read_text())
    assert content["format_version"] == 1
    assert content["tensors"]["t"]["pieces"][0]["file"] == "rank_0000.safetensors"


def test_safetensors_itself_reads_the_files(tmp_path: Path) -> None:
    tensors = {
        "b/bf16": numbers(3, 5, dtype=torch.bfloat16),
        "a/long": numbers(2, dtype=torch.int64),
        "c/flags": torch.tensor([True, False, True]),
        "d/scalar": torch.tensor(2.5),
        "e/empty": torch.empty(0, 3),
    }
    path = FileStore(tmp_path).save(7, [full_shard(k, t) for k, t in tensors.items()], {})
    with safe_open(f"{path}/rank_0000.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(tensors)
        assert file.metadata()["step"] == "7"
        for key, tensor in tensors.items():
            assert torch.equal(file.get_tensor(key), tensor)
            assert file.get_tensor(key).dtype == tensor.dtype


def test_a_dtype_that_safetensors_lacks_is_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"odd: safetensors has no dtype for torch.complex128"
    ):
        FileStore(tmp_path).save(1, [full_shard("odd", torch.zeros(2, dtype=torch.complex128))], {})


def test_what_was_written_is_read_back_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stores other bytes than it was given."""
    save_two_tensors(tmp_path, 1)
    write = os.write

    def flips_a_bit(descriptor: int, data: memoryview) -> int:
        if len(data) == 8 * 6 * 4:  # the bytes of model/a
            data = memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", flips_a_bit)
    with pytest.raises(StorageError, match=r"rank_0000.safetensors: tensor 'model/a'"):
        save_two_tensors(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001"]
