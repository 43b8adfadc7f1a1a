"""Which weights a model has: digests of folders, and what is said of those that differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ascend_run.ops.weight_sources import (
    other_sources,
    weight_source,
    weights_differ,
    weights_digest,
)

TENSORS = {name: torch.zeros(300, 40) for name in ("embedding", "layer", "output")}
"""Each is larger than a sample of it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("place", [0, 6100, 11999])
def test_values_of_every_tensor_count(folder: Path, name: str, place: int) -> None:
    """At its start, in its middle and at its end."""
    before = weights_digest(folder)
    changed = TENSORS[name].clone()
    changed.view(-1)[place] = 1.0
    save_file({**TENSORS, name: changed}, folder / "model.safetensors")
    assert weights_digest(folder) != before


def test_names_shapes_and_dtypes_count(folder: Path) -> None:
    digests = {weights_digest(folder)}
    layer = TENSORS["layer"]
    for changed in (
        {"block" if name == "layer" else name: tensor for name, tensor in TENSORS.items()},
        {**TENSORS, "layer": layer.view(40, 300)},
        {**TENSORS, "layer": layer.view(torch.int32)},
        {**TENSORS, "more": layer.clone()},
    ):
        save_file(changed, folder / "model.safetensors")
        digests.add(weights_digest(folder))
    assert len(digests) == 5


def test_the_same_tensors_in_other_files_are_the_same_weights(folder: Path) -> None:
    """And beside another config; files count that are named."""
    before, named = weights_digest(folder), weights_digest(folder, "config.json")
    (folder / "model.safetensors").unlink()
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, folder / f"{name}.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{ }")
    assert weights_digest(folder) == before
    assert weights_digest(folder, "config.json") != named


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", bytes(16), b"\xff" * 64])
def test_of_another_file_the_content_counts(folder: Path, content: bytes) -> None:
    """It is refused where its tensors are read."""
    digests = {weights_digest(folder)}
    for changed in (content, content + b"."):
        (folder / "more.safetensors").write_bytes(changed)
        digests.add(weights_digest(folder))
    assert len(digests) == 3


def test_weights_differ_where_a_common_tensor_does(folder: Path, tmp_path: Path) -> None:
    """Not by a head that one of them has; without a common tensor they do."""
    other, layer = tmp_path / "differing", TENSORS["layer"]
    other.mkdir()
    for changed, differ in (
        (TENSORS, False),
        ({**TENSORS, "head": layer.clone()}, False),
        ({"layer": layer}, False),
        ({**TENSORS, "layer": layer + 1}, True),
        ({**TENSORS, "layer": layer.view(40, 300)}, True),
        ({**TENSORS, "layer": layer.view(torch.int32)}, True),
        ({"head": layer}, True),
    ):
        save_file(changed, other / "model.safetensors")
        assert weights_differ(folder, other) == weights_differ(other, folder) == differ


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
