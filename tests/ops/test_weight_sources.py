"""Which weights a model has: digests of folders, and what is said of those that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_run.ops.weight_sources import other_sources, weight_source, weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * 2**20))
    return tmp_path


@pytest.mark.parametrize("place", [0, 2**20 - 1, 2**21, 3 * 2**20 - 1])
def test_the_ends_of_a_file_determine_the_digest(folder: Path, place: int) -> None:
    before = weights_digest(folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[place] = 1
    file.write_bytes(content)
    assert weights_digest(folder) != before


def test_names_sizes_and_the_config_count(folder: Path) -> None:
    digests = [weights_digest(folder)]
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    digests.append(weights_digest(folder))
    with (folder / "other.safetensors").open("ab") as stream:
        stream.write(bytes(1))
    digests.append(weights_digest(folder))
    (folder / "config.json").write_text("{ }")
    digests.append(weights_digest(folder))
    assert len({*digests}) == 4
    (folder / "readme.md").write_text("Not part of the model.")
    assert weights_digest(folder) == digests[-1]


def test_what_differs_is_said_of_each_model(folder: Path) -> None:
    one, seed, other = weight_source(str(folder), 1), weight_source(None, 1), weight_source(None, 2)
    assert [*other_sources(None, {"reference": one})] == []
    assert [*other_sources({"reference": one}, {"reference": {**one, "source": "moved"}})] == []
    assert [*other_sources({"a": one, "b": seed}, {"b": other, "c": one})] == [
        f"{name}: the checkpoint's is {before}, this run's is {after}; name the same weights, or "
        "start from scratch in another run.output_dir"
        for name, before, after in (
            ("a", folder, "none"),
            ("b", "initial weights of run.seed=1", "initial weights of run.seed=2"),
            ("c", "none", folder),
        )
    ]
    (problem,) = other_sources({"a": {**one, "digest": ""}}, {"a": one})
    assert f"this run's is {folder}, which has changed; name" in problem
