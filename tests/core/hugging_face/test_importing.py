from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from ascend_run.core.hugging_face.importing import load_hf_weights
from ascend_run.core.hugging_face.stored_tensors import StoredTensors
from ascend_run.plugin_api import CheckpointError, TensorShard

from .tiny_models import TinyModel

DENSE, SPARSE = TinyModel(), TinyModel(experts=4)


def full_shards(parameters: dict[str, Tensor]) -> list[TensorShard]:
    return [
        TensorShard(
            key=name,
            tensor=torch.full_like(tensor, torch.nan),
            global_shape=tuple(tensor.shape),
            offset=(0,) * tensor.dim(),
        )
        for name, tensor in parameters.items()
    ]


def refusal(model: TinyModel, folder: Path, **changes: object) -> str:
    shards = full_shards(model.parameters(model.hf_tensors()))
    with pytest.raises(CheckpointError) as caught:
        load_hf_weights(folder, model.family, model.run_config(**changes), shards)
    for shard in shards:
        assert shard.tensor.isnan().all(), "nothing may be filled before the refusal"
    return str(caught.value)


@st.composite
def tiny_models(draw: st.DrawFn) -> TinyModel:
    vocab = draw(st.integers(1, 40))
    return TinyModel(
        layers=draw(st.integers(1, 2)),
        hidden=draw(st.sampled_from([4, 8])),
        groups=draw(st.sampled_from([2, 4, 6])),
        heads_per_group=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([2, 6])),
        ffn=draw(st.sampled_from([2, 4, 10])),
        vocab=vocab,
        padded_vocab=vocab + vocab % 2 + 2 * draw(st.integers(0, 4)),  # TP 2 halves it
        experts=draw(st.sampled_from([0, 2, 4])),
        tied=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(tiny_models(), st.integers(1, 3))
def test_every_parameter_is_filled_bit_for_bit(model: TinyModel, files: int) -> None:
    hf = model.hf_tensors()
    expected = model.parameters(hf)
    shards = full_shards(expected)
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder), hf, files)
        load_hf_weights(folder, model.family, model.run_config(), shards)
    for shard in shards:
        assert torch.equal(shard.tensor, expected[shard.key]), shard.key


def _boxes(name: str, shape: tuple[int, ...], rank: int, model: TinyModel) -> list[tuple]:
    """(start, stop) along each axis of what a rank of two holds, by Megatron's definition."""

    def half(size: int, start: int = 0) -> tuple[int, int]:
        return start + rank * (size // 2), start + (rank + 1) * (size // 2)

    rows, *others = [(0, size) for size in shape]
    if name.endswith("linear_fc1.weight"):  # half of the gate, half of the up projection
        return [(half(model.ffn), *others), (half(model.ffn, start=model.ffn), *others)]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return [(rows, half(shape[1]))]
    if name.endswith(("layernorm.weight", "router.weight")):
        return [(rows, *others)]
    return [(half(shape[0]), *others)]  # groups, vocabulary, experts


@settings(max_examples=40, deadline=None)
@given(tiny_models())
def test_each_of_two_ranks_holds_its_own_part(model: TinyModel) -> None:
    hf = model.hf_tensors()
    whole = model.parameters(hf)
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder), hf)
        for rank in range(2):
            shards, expected = [], []
            for name, parameter in whole.items():
                for box in _boxes(name, tuple(parameter.shape), rank, model):
                    part = parameter[tuple(slice(*ends) for ends in box)]
                    expected.append(part)
                    shards.append(
                        TensorShard(
                            key=name,
                            tensor=torch.full_like(part, torch.nan),
                            global_shape=tuple(parameter.shape),
                            offset=tuple(start for start, _ in box),
                        )
                    )
            load_hf_weights(folder, model.family, model.run_config(), shards)
            for shard, part in zip(shards, expected, strict=True):
                assert torch.equal(shard.tensor, part), shard.key


def test_only_the_rows_and_columns_of_this_rank_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyModel(layers=1)
    hf = model.hf_tensors()
    model.write(tmp_path, hf)
    read = 0
    rows = StoredTensors.rows

    def counted(self: StoredTensors, *arguments: Any, **options: Any) -> Tensor:
        nonlocal read
        part = rows(self, *arguments, **options)
        read += part.numel()
        return part

    monkeypatch.setattr(StoredTensors, "rows", counted)
    weight = torch.empty(model.hidden, model.ffn // 2)
    key = "decoder.layers.0.mlp.linear_fc2.weight"
    shape = (model.hidden, model.ffn)
    shard = TensorShard(key=key, tensor=weight, global_shape=shape, offset=(0, model.ffn // 2))
    load_hf_weights(tmp_path, model.family, model.run_config(), [shard])
    assert torch.equal(weight, hf["model.layers.0.mlp.down_proj.weight"][:, model.ffn // 2 :])
    assert read == weight.numel()


def test_a_pipeline_stage_fills_its_layers_only(tmp_path: Path) -> None:
    hf = DENSE.hf_tensors()
    DENSE.write(tmp_path, hf)
    expected = DENSE.parameters(hf)
    shards = [p for p in full_shards(expected) if ".layers.1." in p.key]
    load_hf_weights(tmp_path, DENSE.family, DENSE.run_config(), shards)
    assert shards
    assert all(torch.equal(p.tensor, expected[p.key]) for p in shards)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_numbers_are_converted_to_the_parameters_dtype(tmp_path: Path, stored: torch.dtype) -> None:
    hf = {name: tensor.to(stored) for name, tensor in DENSE.hf_tensors().items()}
    DENSE.write(tmp_path, hf)
    expected = DENSE.parameters({name: tensor.float() for name, tensor in hf.items()})
    shards = full_shards(expected)
    load_hf_weights(tmp_path, DENSE.family, DENSE.run_config(), shards)
    assert all(torch.equal(p.tensor, expected[p.key]) for p in shards)


def test_buffers_that_old_checkpoints_hold_are_passed_over(tmp_path: Path) -> None:
    hf = DENSE.hf_tensors()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    DENSE.write(tmp_path, hf | extra)
    shards = full_shards(DENSE.parameters(hf))
    load_hf_weights(tmp_path, DENSE.family, DENSE.run_config(), shards)
    assert not any(shard.tensor.isnan().any() for shard in shards)


def test_empty_tensors_are_passed_over(tmp_path: Path) -> None:
    """transformers stores them for DeepSeek's shared experts where a model has none."""
    hf, name = SPARSE.hf_tensors(), "model.layers.0.mlp.shared_experts.{}_proj.weight"
    extra = {name.format("up"): torch.ones(0, 8), name.format("down"): torch.ones(8, 0)}
    SPARSE.write(tmp_path, hf | extra)
    shards = full_shards(SPARSE.parameters(hf))
    load_hf_weights(tmp_path, SPARSE.family, SPARSE.run_config(), shards)
    assert not any(shard.tensor.isnan().any() for shard in shards)


def test_a_tied_output_layer_may_be_stored_where_it_is_the_embedding(tmp_path: Path) -> None:
    tied = TinyModel(tied=True)
    hf = tied.hf_tensors()
    same = hf | {"lm_head.weight": hf["model.embed_tokens.weight"].clone()}
    tied.write(tmp_path / "same", same)
    load_hf_weights(tmp_path / "same", tied.family, tied.run_config(), full_shards({}))
    other = hf | {"lm_head.weight": hf["model.embed_tokens.weight"] + 1e-6}
    tied.write(tmp_path / "other", other)
    message = refusal(tied, tmp_path / "other")
    assert "lm_head.weight differs from model.embed_tokens.weight" in message


def test_missing_unexpected_and_misshapen_tensors_are_named_together(tmp_path: Path) -> None:
    hf = SPARSE.hf_tensors()
    del hf["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    del hf["model.norm.weight"]
    hf["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    hf["model.layers.0.input_layernorm.weight"] = torch.ones(12, dtype=torch.int32)
    message = refusal(SPARSE, SPARSE.write(tmp_path, hf))
    for expected in (
        "model.layers.1.block_sparse_moe.experts.3.w3.weight is missing",
        "model.norm.weight is missing",
        "model.layers.0.self_attn.q_proj.bias is unexpected",
        "model.layers.0.input_layernorm.weight is stored as I32",
    ):
        assert expected in message
    assert len(message.splitlines()) == 5


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.embed_tokens.weight", (36, 12), "is [36, 12], expected [37, 12]"),
        ("model.layers.0.self_attn.k_proj.weight", (4, 12), "is [4, 12], expected [8, 12]"),
        ("model.layers.0.mlp.up_proj.weight", (10, 11), "is [10, 11], expected [10, 12]"),
        ("model.layers.0.mlp.down_proj.weight", (120,), "is [120], expected [12, 10]"),
        ("model.norm.weight", (), "is [], expected [12]"),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both(
    tmp_path: Path, name: str, shape: tuple[int, ...], expected: str
) -> None:
    hf = DENSE.hf_tensors() | {name: torch.zeros(shape)}
    assert f"{name} {expected}" in refusal(DENSE, DENSE.write(tmp_path, hf))


def test_a_model_of_another_geometry_is_refused_with_what_it_would_need(tmp_path: Path) -> None:
    DENSE.write(tmp_path, DENSE.hf_tensors())
    message = refusal(DENSE, tmp_path, num_query_groups=4)
    assert "4 groups of 1 query heads, a key and a value, each 4 wide, are 48" in message
    assert "40 rows hold no vocabulary of 41" in refusal(DENSE, tmp_path, vocab_size=41)


def test_a_parameter_without_counterpart_is_refused(tmp_path: Path) -> None:
    DENSE.write(tmp_path, DENSE.hf_tensors())
    bias = full_shards({"decoder.layers.0.mlp.linear_fc1.bias": torch.zeros(20)})
    with pytest.raises(CheckpointError, match=r"linear_fc1\.bias has no Hugging Face tensor"):
        load_hf_weights(tmp_path, DENSE.family, DENSE.run_config(), bias)


@pytest.mark.parametrize("field", ["num_layers", "num_moe_experts"])
def test_a_count_beyond_what_is_stored_is_refused_at_once(tmp_path: Path, field: str) -> None:
    SPARSE.write(tmp_path, SPARSE.hf_tensors())
    message = refusal(SPARSE, tmp_path, **{field: 2**31 - 1})
    assert f"model.{field} is 2147483647, but only" in message


# -- the files themselves -----------------------------------------------------------------------


def test_a_folder_of_pickles_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    message = refusal(DENSE, tmp_path)
    assert "holds pickles only (pytorch_model.bin)" in message
    assert "save_pretrained" in message


def test_a_missing_or_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "no Hugging Face folder at" in refusal(DENSE, tmp_path / "nowhere")
    assert "has neither model.safetensors nor" in refusal(DENSE, tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: (2**62).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"{" * 40 + data[48:],
        lambda data: data.replace(b'"F32"', b'"F99"', 1),
        lambda data: data.replace(b"[0,", b"[8,", 1),
    ],
    ids=["empty", "cut", "short", "long", "huge-header", "no-json", "dtype", "overlap"],
)
def test_a_corrupt_file_is_refused_by_name(tmp_path: Path, spoil) -> None:
    DENSE.write(tmp_path, DENSE.hf_tensors())
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    assert spoil(data) != data
    file.write_bytes(spoil(data))
    message = refusal(DENSE, tmp_path)
    assert f"{file} is corrupt or truncated" in message


def _with_index(folder: Path, change) -> Path:
    DENSE.write(folder, DENSE.hf_tensors(), files=2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "a\0b", 7],
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, file: object) -> None:
    save_file({"model.norm.weight": torch.ones(12)}, tmp_path / "outside.safetensors")
    folder = _with_index(
        tmp_path / "model", lambda index: index["weight_map"].update({"model.norm.weight": file})
    )
    message = refusal(DENSE, folder)
    assert f"{str(file)!r} is not the name of a file in this folder" in message


def test_an_index_with_a_missing_file_names_it(tmp_path: Path) -> None:
    _with_index(tmp_path, lambda index: None)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = refusal(DENSE, tmp_path)
    assert "model-00002-of-00002.safetensors is missing; fetch the folder again" in message


def test_an_index_that_contradicts_its_files_is_refused(tmp_path: Path) -> None:
    def swap(index: dict) -> None:
        other = index["weight_map"]["lm_head.weight"]
        assert index["weight_map"]["model.norm.weight"] != other
        index["weight_map"]["model.norm.weight"] = other

    message = refusal(DENSE, _with_index(tmp_path / "swapped", swap))
    assert "model.norm.weight is not in model-0000" in message
    folder = _with_index(tmp_path / "twice", lambda index: None)
    save_file(DENSE.hf_tensors(), folder / "model-00002-of-00002.safetensors")
    assert "is in both model-00001-of-00002.safetensors and" in refusal(DENSE, folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert str(tmp_path / "model.safetensors.index.json") in refusal(DENSE, tmp_path)
