"""Files with the names of ``megatron.legacy``, of all its releases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.family_checks import stored

from .megatron_files import EXPERTS, HEADS, HIDDEN, Files, hugging_face
from .test_mp_rank import check_equal, convert, rank_files

LEGACY_NAMES = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
    "mlp.experts.local_experts": "mlp.local_experts",
    "linear_fc1": "dense_h_to_4h",
    "linear_fc2": "dense_4h_to_h",
    "input_layernorm": "input_norm",
    "pre_mlp_layernorm": "post_attention_norm",
    "final_layernorm": "final_norm",
}
OLDER_NAMES = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "final_norm": "final_layernorm",
}
FIRST_NAMES = {**OLDER_NAMES, "self_attention": "attention"}


def legacy_ranks(
    case: Files, hf: Mapping[str, Tensor], renamed: Mapping[str, str], encoder: str = "encoder"
) -> dict[int, dict[str, Any]]:
    """A tied model as megatron.legacy nests it, by tensor-parallel rank."""
    ranks = case.ranks({**hf, "lm_head.weight": hf["model.embed_tokens.weight"]})
    states = {}
    for (tp, _, _), (chunk,) in ranks.items():
        layers = {}
        for name, tensor in chunk.items():
            if name.startswith("decoder."):
                for old, new in {**LEGACY_NAMES, **renamed}.items():
                    name = name.replace(old, new)
                layers[name.removeprefix("decoder.")] = tensor.clone()
        words = {"weight": chunk["embedding.word_embeddings.weight"]}
        states[tp] = {"language_model": {"embedding": {"word_embeddings": words}, encoder: layers}}
    return states


def written_ranks(folder: Path, states: Mapping[int, Any], version: float | None) -> Path:
    for tp, model in states.items():
        rank = folder / f"mp_rank_{tp:02d}"
        rank.mkdir(parents=True)
        stated = {} if version is None else {"checkpoint_version": version}
        torch.save({**stated, "model": model}, rank / "model_optim_rng.pt")
    return folder


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("renamed", [{}, OLDER_NAMES], ids=["new", "old"])
def test_legacy_names(renamed: Mapping[str, str], experts: bool, tmp_path: Path) -> None:
    """Of both releases, and with the zero bias of an early router."""
    folder, case = tmp_path / "hf", Files(padded=128, tied=True, experts="one" if experts else "")
    hf = hugging_face(folder, tied=True, experts=experts)
    want = legacy_ranks(case, hf, renamed)
    model = want[0]["language_model"]
    layers = dict(model["encoder"])
    if experts:
        model["encoder"]["layers.2.mlp.router.bias"] = torch.zeros(EXPERTS)
    source = written_ranks(tmp_path / "legacy", want, 3.0)
    config = ("--config", folder / "config.json")
    assert convert("--to", "hf", *config, source, tmp_path / "out") == 0
    check_equal(stored(tmp_path / "out"), hf)
    assert convert("--to", "mp-rank-legacy", folder, tmp_path / "again") == 0
    assert convert("--to", "hf", tmp_path / "again", tmp_path / "hf-again") == 0
    check_equal(stored(tmp_path / "hf-again"), hf)
    if not renamed:
        (state,) = rank_files(tmp_path / "again").values()
        got = state["model"]["language_model"]
        check_equal(got["encoder"], layers)
        check_equal(got["embedding"]["word_embeddings"], model["embedding"]["word_embeddings"])


@pytest.mark.parametrize("version", [None, 1.0, 2.0])
def test_queries_keys_and_values_of_an_early_version(
    version: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """[3, heads, width] per rank without a version, [heads, width, 3] in version 1.0."""
    folder = tmp_path / "hf"
    hf = hugging_face(folder, tied=True, groups=HEADS)
    states = legacy_ranks(Files(tp=2, padded=128, tied=True), hf, FIRST_NAMES, "transformer")
    for tp, state in states.items():
        layers = state["language_model"]["transformer"]
        for layer in range(4):
            at = f"model.layers.{layer}.self_attn."
            rows = slice(tp * HIDDEN // 2, (tp + 1) * HIDDEN // 2)
            qkv = [hf[f"{at}{part}_proj.weight"][rows] for part in "qkv"]
            if version is None:
                layers[f"layers.{layer}.attention.query_key_value.weight"] = torch.cat(qkv)
            elif version == 1.0:
                every = torch.empty(3 * HIDDEN // 2, HIDDEN)
                for part, tensor in enumerate(qkv):
                    every[part::3] = tensor
                layers[f"layers.{layer}.attention.query_key_value.weight"] = every
    source = written_ranks(tmp_path / "legacy", states, version)
    config = ("--config", folder / "config.json")
    assert convert("--to", "hf", *config, source, tmp_path / "out") == 0
    check_equal(stored(tmp_path / "out"), hf)
    if version != 2.0:
        hugging_face(tmp_path / "shared", tied=True)
        config = ("--config", tmp_path / "shared" / "config.json")
        assert convert("--to", "hf", *config, source, tmp_path / "out2") == 2
        assert f"checkpoint_version {version or 0.0}" in capsys.readouterr().err


def test_a_router_with_a_bias_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = hugging_face(tmp_path / "hf", tied=True, experts=True)
    states = legacy_ranks(Files(padded=128, tied=True, experts="one"), hf, {})
    layers = states[0]["language_model"]["encoder"]
    layers["layers.0.mlp.router.bias"] = torch.ones(EXPERTS)
    source = written_ranks(tmp_path / "legacy", states, 3.0)
    config = ("--config", tmp_path / "hf" / "config.json")
    assert convert("--to", "hf", *config, source, tmp_path / "out") == 2
    assert "layers.0.mlp.router.bias: no parameter of a GPTModel" in capsys.readouterr().err
