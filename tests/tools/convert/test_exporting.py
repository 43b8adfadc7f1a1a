from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file

from ascend_run.core.hugging_face.importing import load_hf_weights
from ascend_run.plugin_api import CheckpointError, ConfigError, StorageError
from ascend_run.tools.convert.exporting import export_hf
from tests.core.hugging_face.test_importing import full_shards, tiny_models
from tests.core.hugging_face.tiny_models import TinyModel

DENSE, SPARSE = TinyModel(), TinyModel(experts=4)


@settings(max_examples=60, deadline=None)
@given(tiny_models())
def test_export_undoes_import_bit_for_bit(model: TinyModel) -> None:
    hf = model.hf_tensors()
    config = model.run_config()
    shards = full_shards(model.parameters(hf))
    with tempfile.TemporaryDirectory() as root:
        load_hf_weights(model.write(Path(root, "in"), hf, files=2), model.family, config, shards)
        state = ((shard.key, shard.tensor) for shard in shards)
        export_hf(Path(root, "out"), model.family, config, state)
        written = load_file(Path(root, "out", "model.safetensors"))
    assert written.keys() == hf.keys()
    assert all(torch.equal(written[name], hf[name]) for name in hf)


@pytest.mark.parametrize("experts", [0, 4])
def test_layers_of_multi_token_prediction_are_stored_as_by_deepseek(
    tmp_path: Path, experts: int
) -> None:
    """After the model's own, each with copies of the shared embedding and output layer."""
    longer = TinyModel(layers=4, experts=experts)
    ignored = {*longer.family.ignored, "num_nextn_predict_layers"}
    family = attrs.evolve(longer.family, ignored=frozenset(ignored))
    config = TinyModel(experts=experts).run_config(mtp_num_layers=2)
    hf = longer.hf_tensors()
    ours = longer.parameters(hf)
    width = longer.hidden
    for depth, layer in enumerate((2, 3)):
        theirs, own = f"model.layers.{layer}", f"mtp.layers.{depth}"
        for name in [name for name in ours if name.startswith(f"decoder.layers.{layer}.")]:
            inner = name.split(".", 3)[3]
            ours[f"{own}.transformer_layer.{inner}"] = ours.pop(name)
        for name, stored in {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}.items():
            shape = (width, 2 * width) if name == "eh_proj" else (width,)
            hf[f"{theirs}.{stored}.weight"] = ours[f"{own}.{name}.weight"] = torch.randn(shape)
        norm = torch.randn(width)
        hf[f"{theirs}.shared_head.norm.weight"] = ours[f"{own}.final_layernorm.weight"] = norm
        hf[f"{theirs}.embed_tokens.weight"] = hf["model.embed_tokens.weight"].clone()
        hf[f"{theirs}.shared_head.head.weight"] = hf["lm_head.weight"].clone()
    shards = full_shards(ours)
    load_hf_weights(longer.write(tmp_path / "in", hf), family, config, shards)
    for shard in shards:
        assert torch.equal(shard.tensor, ours[shard.key]), shard.key
    export_hf(tmp_path / "out", family, config, ours.items())
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == hf.keys()
    assert all(torch.equal(written[name], hf[name]) for name in hf)
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 2

    none = TinyModel(experts=experts)
    own = none.parameters(none.hf_tensors())
    with pytest.raises(
        CheckpointError, match=r"set model\.mtp_num_layers=2 to train them, or 0 to"
    ):
        load_hf_weights(tmp_path / "in", family, none.run_config(), full_shards(own))
    shards = full_shards(own)
    load_hf_weights(tmp_path / "in", family, none.run_config(mtp_num_layers=0), shards)
    assert all(torch.equal(shard.tensor, ours[shard.key]) for shard in shards)

    other = hf | {"model.layers.3.embed_tokens.weight": hf["model.embed_tokens.weight"] + 1}
    with pytest.raises(CheckpointError) as refused:
        load_hf_weights(longer.write(tmp_path / "other", other), family, config, full_shards(ours))
    assert [*refused.value.problems] == [
        (
            "model.layers.3.embed_tokens.weight differs from model.embed_tokens.weight, which the "
            "model shares"
        )
    ]


def test_a_large_model_is_split_into_files_that_the_index_names(tmp_path: Path) -> None:
    hf = SPARSE.hf_tensors()
    parameters = SPARSE.parameters(hf)
    limit = 4000
    export_hf(
        tmp_path / "out",
        SPARSE.family,
        SPARSE.run_config(),
        parameters.items(),
        max_shard_bytes=limit,
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 3
    assert files == [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        [*files, "config.json", "model.safetensors.index.json"]
    )
    written = {}
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as handle:
            names = list(handle.keys())
            assert handle.metadata() == {"format": "pt"}
            assert all(index["weight_map"][name] == file for name in names)
            part = {name: handle.get_tensor(name) for name in names}
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= limit
        written |= part
    assert written.keys() == hf.keys()
    assert all(torch.equal(written[name], hf[name]) for name in hf)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in hf.values())
    shards = full_shards(parameters)
    load_hf_weights(tmp_path / "out", SPARSE.family, SPARSE.run_config(), shards)
    assert all(torch.equal(shard.tensor, parameters[shard.key]) for shard in shards)


def test_an_incomplete_or_foreign_model_leaves_nothing_behind(tmp_path: Path) -> None:
    state = DENSE.parameters(DENSE.hf_tensors())
    del state["decoder.final_layernorm.weight"]
    state["decoder.layers.0.mlp.linear_fc1.bias"] = torch.zeros(20)
    qkv = "decoder.layers.1.self_attention.linear_qkv.weight"
    state[qkv] = state[qkv][:-4]
    with pytest.raises(CheckpointError) as caught:
        export_hf(tmp_path / "out", DENSE.family, DENSE.run_config(), state.items())
    message = str(caught.value)
    assert "decoder.final_layernorm.weight is missing" in message
    assert "linear_fc1.bias does not exist in a ToyDenseForCausalLM" in message
    assert f"{qkv}: 28 rows; 2 groups" in message
    assert os.listdir(tmp_path) == []


def test_a_model_unsupported_by_transformers_is_rejected_before_writing(
    tmp_path: Path,
) -> None:
    config = DENSE.run_config(qk_layernorm=True)
    with pytest.raises(ConfigError, match="qk_layernorm"):
        export_hf(tmp_path / "out", DENSE.family, config, [])
    assert os.listdir(tmp_path) == []


def test_an_existing_folder_is_never_written_into(tmp_path: Path) -> None:
    state = DENSE.parameters(DENSE.hf_tensors())
    (tmp_path / "out").mkdir()
    export_hf(tmp_path / "out", DENSE.family, DENSE.run_config(), state.items())
    before = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    with pytest.raises(StorageError, match="is not empty; name a new folder"):
        export_hf(tmp_path / "out", DENSE.family, DENSE.run_config(), state.items())
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == before


def test_a_full_disk_is_reported_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    state = DENSE.parameters(DENSE.hf_tensors())
    with pytest.raises(StorageError, match="No space left on device"):
        export_hf(tmp_path / "out", DENSE.family, DENSE.run_config(), state.items())
    assert os.listdir(tmp_path) == []


def test_parameters_may_come_one_by_one_and_transposed(tmp_path: Path) -> None:
    hf = DENSE.hf_tensors()
    state = DENSE.parameters(hf)

    def one_by_one():
        for name in reversed(list(state)):
            tensor = state[name]
            yield name, torch.nn.Parameter(tensor.t().contiguous().t())

    export_hf(tmp_path / "out", DENSE.family, DENSE.run_config(), one_by_one())
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], hf[name]) for name in hf)
