"""The published layer of multi-token prediction: its tensors, and its key in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ascend_run.core.hugging_face.parameter_rows import mtp_copies, parameter_sources
from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api import RunConfig
from ascend_run.plugins.models.deepseek_v3 import DeepseekV3
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from tests.plugins.models.cases import BY_NAME
from tests.support.family_checks import stored
from tests.support.tiny_configs import model_fields, parallel_fields

FAMILY = DeepseekV3.family
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 3,
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PUBLISHED = {
    *("embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight"),
    *("shared_head.norm.weight", "shared_head.head.weight"),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *("self_attn.q_a_proj.weight", "self_attn.q_a_layernorm.weight", "self_attn.q_b_proj.weight"),
    *("self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_a_layernorm.weight"),
    *("self_attn.kv_b_proj.weight", "self_attn.o_proj.weight"),
    *("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    *(f"mlp.experts.{expert}.{name}.weight" for expert in range(8) for name in PROJECTIONS),
    *(f"mlp.shared_experts.{name}.weight" for name in PROJECTIONS),
}
"""Names in model.safetensors.index.json of deepseek-ai/DeepSeek-V3 after ``model.layers.61.``."""


def run_config(depths: int | None) -> RunConfig:
    read = config_from_hf(FAMILY, {**CONFIG, "num_nextn_predict_layers": 1})
    values = {**FAMILY.defaults, **read}
    fields = {name.removeprefix("model."): value for name, value in values.items()}
    assert "mtp_num_layers" not in fields  # folders of transformers have the key alone
    model = model_fields({**fields, "mtp_num_layers": depths})
    return RunConfig(model=model, parallel=parallel_fields())


def test_the_number_of_depths_is_written_to_config_json() -> None:
    assert config_to_hf(FAMILY, run_config(2))["num_nextn_predict_layers"] == 2
    for none in (None, 0):
        assert "num_nextn_predict_layers" not in config_to_hf(FAMILY, run_config(none))


def test_a_depth_has_the_published_tensors() -> None:
    config = run_config(1)
    sources = parameter_sources(FAMILY, config)
    names = {*mtp_copies(FAMILY, config)}
    names |= {name for source in sources.values() for name in source.hf_names}
    before = "model.layers.4."
    found = {name.removeprefix(before) for name in names if name.startswith(before)}
    assert found == PUBLISHED
    bias = sources["mtp.layers.0.transformer_layer.mlp.router.expert_bias"]
    assert bias.hf_names == (f"{before}mlp.gate.e_score_correction_bias",)


@pytest.mark.parametrize("target", ["ascend-run", "mp-rank"])
def test_conversion_keeps_the_layers_that_a_folder_stores(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its number of layers; a format that has no place for them refuses by name."""
    source, hf = tmp_path / "hf", BY_NAME["deepseek_v3"]
    hf.model(num_hidden_layers=3, q_lora_rank=None, rms_norm_eps=1e-6).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    tensors, width, at = stored(source), config["hidden_size"], "model.layers.2."
    tensors |= {f"{at}{norm}.weight": torch.rand(width) for norm in ("enorm", "hnorm")}
    tensors[f"{at}shared_head.norm.weight"] = torch.rand(width)
    tensors[f"{at}eh_proj.weight"] = torch.rand(width, 2 * width)
    tensors[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    code = run(["convert", "--to", target, str(source), str(tmp_path / "out")])
    if target == "mp-rank":
        assert code == 2
        assert "mtp" in capsys.readouterr().err
        return
    assert code == 0
    assert run(["convert", "--to", "hf", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    got = stored(tmp_path / "back")
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
