"""Damage of every kind is found before a tensor is loaded, and the message says where."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ascend_run.core.checkpoint import FileStore
from ascend_run.core.checkpoint.manifest import Manifest
from ascend_run.plugin_api import CheckpointError, TensorShard
from ascend_run.text.strict_json import render

from .tensors import blank, full_shard, numbers, part, rows
from .thread_ranks import ThreadRanks, all_ranks, on_ranks

FOLDER = "step_00000002"


def shards_of(rank: int, size: int, start: int) -> list[TensorShard]:
    cut = rows("model/cut", numbers(8, 16, start=start), rank, size)
    whole = part("model/whole", numbers(64, start=-start), (0,), (64,), writes=rank == 0)
    own = full_shard(f"rng/rank_{rank:05d}/torch", torch.arange(32, dtype=torch.uint8) + rank)
    return [cut, whole, own]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of two ranks, with other numbers in each."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        all_ranks(
            2,
            lambda ranks, step=step: FileStore(folder, ranks=ranks, keep_last=0).save(
                step, shards_of(ranks.rank, 2, 100 * step), {"consumed_samples": 1234}
            ),
        )
    return folder


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "damaged"))


def errors_of(folder: Path) -> list[str]:
    """What verify and load, on two ranks, say of step 2."""

    def verify(ranks: ThreadRanks) -> None:
        FileStore(folder, ranks=ranks).verify(2)

    def load(ranks: ThreadRanks) -> None:
        blanks = [blank(shard) for shard in shards_of(ranks.rank, 2, 200)]
        try:
            FileStore(folder, ranks=ranks).load(2, blanks)
        finally:
            assert all(shard.tensor.eq(7).all() for shard in blanks), "filled before it was checked"

    results = [*on_ranks(2, verify), *on_ranks(2, load)]
    assert all(isinstance(result, CheckpointError) for result in results), results
    return [str(result) for result in results]


def shard(folder: Path, rank: int = 0) -> Path:
    return folder / FOLDER / f"rank_{rank:04d}.safetensors"


def swap_shards(folder: Path) -> None:
    one, other, spare = shard(folder, 0), shard(folder, 1), folder / "spare"
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def change_header(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = shard(folder).read_bytes()
        assert data.count(old) == 1
        assert len(old) == len(new)
        shard(folder).write_bytes(data.replace(old, new))

    return change


def replace_by_link(folder: Path) -> None:
    outside = folder.parent / "outside"
    shard(folder).rename(outside)
    shard(folder).symlink_to(outside)


def stale_shard(folder: Path) -> None:
    shutil.copy(folder / "step_00000001" / "rank_0000.safetensors", shard(folder))


def rename_step_1_to_2(folder: Path) -> None:
    shutil.rmtree(folder / FOLDER)
    (folder / "step_00000001").rename(folder / FOLDER)


def manifest_path(folder: Path) -> Path:
    return folder / FOLDER / "manifest.json"


SHARD, MANIFEST = "rank_0000.safetensors", "manifest.json"
SHAPE = b'"shape": [4, 16]'
DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing file": (lambda f: shard(f).unlink(), SHARD, "'model/cut'"),
    "empty file": (lambda f: shard(f).write_bytes(b""), SHARD, "'model/cut'"),
    "swapped shards": (swap_shards, SHARD, "'rng/rank_00000/torch'"),
    "stale shard": (stale_shard, SHARD, "'model/cut'"),
    "other dtype": (change_header(b'"F32", ' + SHAPE, b'"I32", ' + SHAPE), SHARD, "'model/cut'"),
    "other shape": (change_header(SHAPE, b'"shape": [16, 4]'), SHARD, "'model/cut'"),
    "a link to a file elsewhere": (replace_by_link, SHARD, "not a regular file"),
    "another step's folder": (rename_step_1_to_2, MANIFEST, "step 1"),
    "no manifest": (lambda f: manifest_path(f).unlink(), MANIFEST, "No such file"),
    "empty manifest": (lambda f: manifest_path(f).write_bytes(b""), MANIFEST, "Expecting value"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_kind_of_damage_is_found_and_named(damaged: Path, damage: str) -> None:
    break_it, file, named = DAMAGES[damage]
    break_it(damaged)
    for message in errors_of(damaged):
        assert file in message
        assert named in message


def test_the_undamaged_copy_is_valid(damaged: Path) -> None:
    with pytest.raises(AssertionError):
        errors_of(damaged)


@pytest.mark.parametrize("seed", range(40))
def test_any_flipped_bit_or_truncation_is_found_and_its_file_named(
    damaged: Path, seed: int
) -> None:
    draw = random.Random(seed)
    victim = draw.choice(sorted((damaged / FOLDER).iterdir()))
    data = bytearray(victim.read_bytes())
    if draw.random() < 0.75:
        bit = draw.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
    else:
        del data[draw.randrange(len(data)) :]
    victim.write_bytes(data)
    for message in errors_of(damaged):
        assert victim.name in message
        if victim.suffix == ".safetensors":
            assert "tensor 'model/" in message or "tensor 'rng/" in message


def test_a_flipped_bit_in_a_tensor_names_that_tensor_and_no_other(damaged: Path) -> None:
    data = bytearray(shard(damaged).read_bytes())
    start = data.index(numbers(64, start=-200).numpy().tobytes())
    data[start + 17] ^= 4
    shard(damaged).write_bytes(data)
    for message in errors_of(damaged):
        assert "rank_0000.safetensors: tensor 'model/whole' has checksum" in message
        assert "model/cut" not in message


def forged(folder: Path, change: Callable[[dict], object]) -> None:
    """A changed manifest with an updated checksum."""
    path = manifest_path(folder)
    content = json.loads(path.read_bytes())
    change(content)
    path.write_bytes(signed(content))


def signed(content: dict) -> bytes:
    content.pop("sha256", None)
    return render({**content, "sha256": hashlib.sha256(render(content)).hexdigest()})


def add_file(name: str) -> Callable[[dict], object]:
    return lambda c: c["files"].update({name: c["files"][SHARD]})


def cut(content: dict) -> dict:
    return content["tensors"]["model/cut"]


FORGERIES: dict[str, tuple[Callable[[dict], object], str]] = {
    "a file above the folder": (add_file("../x"), "'../x' is not the plain name"),
    "an absolute file": (add_file("/etc/passwd"), "'/etc/passwd' is not the plain name"),
    "a file not listed": (lambda c: cut(c)["pieces"][0].update(file="../x"), "no file '../x'"),
    "an overlap": (lambda c: cut(c)["pieces"][0].update(offset=[4, 0]), "overlaps"),
    "a negative offset": (lambda c: cut(c)["pieces"][0].update(offset=[-1, 0]), "not a count"),
    "a huge shape": (lambda c: cut(c).update(global_shape=[2**70, 2]), "not a count"),
    "a missing piece": (lambda c: cut(c)["pieces"].pop(), "written by no rank"),
    "an unknown dtype": (lambda c: cut(c).update(dtype="Q3"), "unknown dtype"),
    "another dtype": (lambda c: cut(c).update(dtype="I32"), "I32"),
    "another name": (lambda c: cut(c)["pieces"][0].update(name="x"), "'model/cut' is missing"),
    "two keys for one place": (lambda c: c["tensors"].update(twin=cut(c)), "is used twice"),
    "a newer format": (lambda c: c.update(format_version=2), "newer ascend-run"),
    "no format": (lambda c: c.pop("format_version"), "format_version"),
    "a size as text": (lambda c: c["files"][SHARD].update(size="9"), "not a count"),
    "tensors as a list": (lambda c: c.update(tensors=[]), "not an object"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest_is_refused(damaged: Path, forgery: str) -> None:
    change, named = FORGERIES[forgery]
    forged(damaged, change)
    for message in errors_of(damaged):
        assert named in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b'{"step": 1, "step": 1}', "'step' is given twice"),
        (b'{"step": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b"\xff\xfe", "decode"),
        (b"[]", "not a JSON object"),
    ],
    ids=["duplicate key", "NaN", "depth", "not text", "list"],
)
def test_json_that_does_not_mean_one_thing_is_refused(text: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Manifest.parse(text)


def test_a_manifest_with_the_same_content_in_other_bytes_is_refused(saved: Path) -> None:
    data = manifest_path(saved).read_bytes()
    assert Manifest.parse(data).render() == data
    with pytest.raises(ValueError, match="was changed"):
        Manifest.parse(data.replace(b": ", b":  ", 1))


def test_a_checkpoint_folder_that_is_a_link_is_refused(damaged: Path) -> None:
    (damaged / FOLDER).rename(damaged.parent / "outside")
    (damaged / FOLDER).symlink_to(damaged.parent / "outside")
    for message in errors_of(damaged):
        assert "symbolic link" in message


def test_many_problems_are_counted_rather_than_all_shown(tmp_path: Path) -> None:
    FileStore(tmp_path).save(2, [full_shard(f"t{i}", numbers(4)) for i in range(30)], {})
    data = bytearray(shard(tmp_path).read_bytes())
    for i in range(30):
        data[-16 * i - 1] ^= 1
    shard(tmp_path).write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        FileStore(tmp_path).verify(2)
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == "and 10 more"
