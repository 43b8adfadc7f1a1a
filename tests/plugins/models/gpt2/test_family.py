from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ascend_run.core.hugging_face.importing import load_hf_weights
from ascend_run.core.hugging_face.json_files import read_hf_config
from ascend_run.plugin_api import CheckpointError, ConfigError, TensorShard
from ascend_run.plugins.models.gpt2 import Gpt2
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from tests.support import family_checks

FAMILY = Gpt2.family

GPT2_SMALL = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
HIDDEN, LAYERS, PLACES = 16, 2, 32


def shapes(width: int, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of our parameters of the tiny model below; ``width`` is the MLP's."""
    found: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (64, HIDDEN),
        "embedding.position_embeddings.weight": (PLACES, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        "decoder.final_layernorm.bias": (HIDDEN,),
    }
    if not tied:
        found["output_layer.weight"] = (64, HIDDEN)
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}"
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            found |= {f"{at}.{norm}.weight": (HIDDEN,), f"{at}.{norm}.bias": (HIDDEN,)}
        for name, rows, columns in (
            ("self_attention.linear_qkv", 3 * HIDDEN, HIDDEN),
            ("self_attention.linear_proj", HIDDEN, HIDDEN),
            ("mlp.linear_fc1", width, HIDDEN),
            ("mlp.linear_fc2", HIDDEN, width),
        ):
            found |= {f"{at}.{name}.weight": (rows, columns), f"{at}.{name}.bias": (rows,)}
    return found


def save_tiny(folder: Path, **changes: Any) -> Path:
    """Write a random tiny model by transformers, with nonzero biases."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=37, n_positions=PLACES, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, **changes
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size="8KB")
    return folder


def test_a_model_with_experts_is_no_gpt2() -> None:
    (condition,) = Gpt2.manifest.requires
    assert not condition.holds(family_checks.run_config(FAMILY, GPT2_SMALL, num_moe_experts=4))
    assert condition.holds(family_checks.run_config(FAMILY, GPT2_SMALL, num_moe_experts=None))


def test_a_published_config_is_understood() -> None:
    values = config_from_hf(FAMILY, GPT2_SMALL)
    assert values["model.hidden_size"] == 768
    assert values["model.ffn_hidden_size"] is None
    assert values["model.max_position_embeddings"] == 1024
    assert values["model.hidden_dropout"] == values["model.attention_dropout"] == 0.1
    assert values["model.share_embeddings_and_output_weights"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function is 'relu'; only 'gelu_new'"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True; only False",
        ),
        ({"scale_attn_weights": False}, "scale_attn_weights is False; only True"),
        ({"add_cross_attention": True}, "add_cross_attention is True; only False"),
        (
            {"embd_pdrop": 0.2},
            "resid_pdrop is 0.1 and embd_pdrop is 0.2; both are model.hidden_dropout, so",
        ),
        ({"n_head": 7}, r"n_embd is 768; it must be a multiple of n_head \(7\)"),
        ({"rope_theta": 10000.0}, "unknown key 'rope_theta'"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf(FAMILY, GPT2_SMALL | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_query_groups": 4}, "model.num_query_groups is 4; GPT2LMHeadModel has only 12"),
        ({"kv_channels": 32}, "model.kv_channels is 32; GPT2LMHeadModel has only 64"),
        ({"normalization": "RMSNorm"}, "model.normalization is 'RMSNorm'"),
        ({"add_bias_linear": False}, "model.add_bias_linear is False"),
        ({"position_embedding_type": "rope"}, "model.position_embedding_type is 'rope'"),
    ],
)
def test_a_model_that_is_no_gpt2_is_not_written_as_one(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_to_hf(FAMILY, family_checks.run_config(FAMILY, GPT2_SMALL, **changes))


def read(folder: Path) -> dict[str, torch.Tensor]:
    ours = {name: torch.full(shape, torch.nan) for name, shape in shapes(64, tied=True).items()}
    shards = [
        TensorShard(key=name, tensor=x, global_shape=tuple(x.shape), offset=(0,) * x.dim())
        for name, x in ours.items()
    ]
    config = family_checks.run_config(FAMILY, read_hf_config(folder))
    load_hf_weights(folder, FAMILY, config, shards)
    return ours


def rewrite(folder: Path, target: Path, change: Any) -> Path:
    """Write the same model in one file, with changed tensors."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = change(family_checks.stored(folder))
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors")
    assert load_file(target / "model.safetensors").keys() == tensors.keys()
    return target


def test_the_published_names_without_a_prefix_and_with_masks_are_read(tmp_path: Path) -> None:
    """As the original GPT-2 on the hub: saved without its head, causal masks as buffers."""
    folder = save_tiny(tmp_path / "theirs")

    def as_published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
        mask = torch.ones(1, 1, PLACES, PLACES).tril()
        return bare | {f"h.{layer}.attn.bias": mask.clone() for layer in range(LAYERS)}

    want, got = read(folder), read(rewrite(folder, tmp_path / "published", as_published))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_matrix_that_lies_the_other_way_round_is_refused(tmp_path: Path) -> None:
    """Weights of a Linear, [out, in], where Conv1D's are [in, out]."""
    folder = save_tiny(tmp_path / "theirs")
    name = "transformer.h.1.mlp.c_fc.weight"
    turned = rewrite(folder, tmp_path / "turned", lambda x: x | {name: x[name].t()})
    with pytest.raises(CheckpointError, match=rf"{name} is \[64, 16\], expected \[16, 64\]"):
        read(turned)
