"""``torch_dist`` checkpoints, both ways. Those of Megatron's own model: test_with_megatron."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.support.family_checks import stored

from .megatron_files import HIDDEN, VOCABULARY, hugging_face
from .test_mp_rank import Hostile, check_equal, convert, refused

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize(
    "kind", ["dense", "tied", "experts", "experts of the engine", "latent", "latent of the engine"]
)
def test_a_folder_becomes_torch_dist_and_the_same_again(kind: str, tmp_path: Path) -> None:
    latent = "queries" if "latent" in kind else ""
    experts = "experts" in kind or bool(latent)
    hf = hugging_face(tmp_path / "hf", experts=experts, tied=kind == "tied", latent=latent)
    words = ["--transformer-impl", "transformer_engine"] if "engine" in kind else []
    assert convert("--to", "torch-dist", *words, tmp_path / "hf", tmp_path / "dist") == 0
    assert convert("--to", "hf", tmp_path / "dist", tmp_path / "out") == 0
    check_equal(stored(tmp_path / "out"), hf)
    (tmp_path / "dist" / "config.toml").unlink()
    family = "deepseek_v2" if latent else "mixtral" if experts else "llama"
    assert convert("--to", "hf", "--family", family, tmp_path / "dist", tmp_path / "again") == 0
    check_equal(stored(tmp_path / "again"), hf)


def test_every_form_in_a_chain_gives_the_first_files(tmp_path: Path) -> None:
    hf = hugging_face(tmp_path / "hf", experts=True)
    ranks = ["--tp", "2", "--pp", "2", "--ep", "2"]
    forms = ("torch-dist", "mp-rank", "torch-dist", "ascend-run", "hf")
    folder = tmp_path / "hf"
    for number, form in enumerate(forms):
        written = tmp_path / str(number)
        words = ranks if form == "mp-rank" else []
        assert convert("--to", form, *words, folder, written) == 0
        folder = written
    check_equal(stored(folder), hf)
    first, second = (stored_dist(tmp_path / number) for number in ("0", "2"))
    check_equal(second, first)


def stored_dist(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the one iteration, read by torch."""
    (iteration,) = folder.glob("iter_*")
    entries = FileSystemReader(iteration).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    assert len(state) > 8
    dcp.load(state, checkpoint_id=iteration, no_dist=True)
    return state


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    """Layers are stacked under one name."""
    hf = hugging_face(tmp_path / "hf")
    assert convert("--to", "torch-dist", tmp_path / "hf", tmp_path / "dist") == 0
    folder = tmp_path / "dist" / "iter_0000001"
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {name for name in entries if "layers" in name} == {
        f"decoder.layers.{inner}weight"
        for inner in (
            "self_attention.linear_qkv.layer_norm_",
            "mlp.linear_fc1.layer_norm_",
            "self_attention.linear_qkv.",
            "self_attention.linear_proj.",
            "mlp.linear_fc1.",
            "mlp.linear_fc2.",
        )
    }
    state: dict[str, Tensor] = {
        "decoder.layers.mlp.linear_fc2.weight": torch.empty(4, HIDDEN, 24),
        "embedding.word_embeddings.weight": torch.empty(VOCABULARY, HIDDEN),
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(
        state["decoder.layers.mlp.linear_fc2.weight"],
        torch.stack([hf[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(4)]),
    )
    assert torch.equal(state["embedding.word_embeddings.weight"], hf["model.embed_tokens.weight"])


# -- bad input --------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One iteration, written by torch itself with a name per layer; its config lies beside."""
    hf = hugging_face(tmp_path / "hf", tied=True)
    assert convert("--to", "mp-rank", tmp_path / "hf", tmp_path / "mp") == 0
    (file,) = (tmp_path / "mp").glob("*/*/model_optim_rng.pt")
    (tmp_path / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    dcp.save(
        torch.load(file, weights_only=False)["model"], checkpoint_id=tmp_path / "dist", no_dist=True
    )
    assert (
        convert(
            "--to", "hf", "--config", tmp_path / "config.json", tmp_path / "dist", tmp_path / "read"
        )
        == 0
    )
    check_equal(stored(tmp_path / "read"), hf)
    return tmp_path / "dist"


def test_a_hostile_index_runs_nothing(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = checkpoint / ".metadata"
    index.write_bytes(pickle.dumps(Hostile(checkpoint.parent)))
    assert f"{index} is refused: it asks for posix.system" in refused(capsys, checkpoint)
    assert not (checkpoint.parent / "owned").exists()


def test_a_hostile_chunk_runs_nothing(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In place of the first chunk of the file."""
    (file,) = checkpoint.glob("*.distcp")
    bad = checkpoint.parent / "bad.pt"
    torch.save(Hostile(checkpoint.parent), bad)
    data = bytearray(file.read_bytes())
    data[: bad.stat().st_size] = bad.read_bytes()
    file.write_bytes(data)
    bad.unlink()
    assert str(file) in refused(capsys, checkpoint)
    assert not (checkpoint.parent / "owned").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_truncated_file(name: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkpoint / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert f"{file} is truncated" in refused(capsys, checkpoint)


def test_a_missing_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = checkpoint.glob("*.distcp")
    os.unlink(file)
    assert f"{file} cannot be read: No such file" in refused(capsys, checkpoint)


def test_a_file_outside_the_folder(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def outside(index: Any) -> None:
        for info in index.storage_data.values():
            info.relative_path = "../../etc/passwd"

    rewrite(checkpoint, outside)
    assert "'../../etc/passwd' is no file" in refused(capsys, checkpoint)


def test_a_tensor_that_is_incomplete(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def larger(index: Any) -> None:
        entry = index.state_dict_metadata["decoder.final_layernorm.weight"]
        entry.size = torch.Size([HIDDEN + 1])

    rewrite(checkpoint, larger)
    assert "decoder.final_layernorm.weight: " in refused(capsys, checkpoint)


def rewrite(checkpoint: Path, change: Any) -> None:
    path = checkpoint / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))
