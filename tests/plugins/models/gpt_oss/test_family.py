"""gpt-oss as it is published: experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ascend_run.plugin_api import CheckpointError
from ascend_run.plugins.models.gpt_oss import GptOss
from ascend_run.prepare.hugging_face.config_keys import config_to_hf
from tests.plugins.models.cases import BY_NAME
from tests.support import family_checks

FAMILY = BY_NAME["gpt_oss"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the tensors and keys of the published ones."""
    folder = tmp_path / "theirs"
    (changes, *_) = FAMILY.variants.values()
    FAMILY.model(**{**changes, "intermediate_size": 64}).save_pretrained(folder)
    tensors, generator = family_checks.stored(folder), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), generator=generator)
        tensors |= {f"{name}_blocks": blocks.byte(), f"{name}_scales": scales.byte()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config |= {"initial_context_length": 8, "experts_per_token": config["num_experts_per_tok"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shapes() -> dict[str, tuple[int, ...]]:
    model = FAMILY.model(intermediate_size=64)
    ours = FAMILY.in_our_layout(dict(model.named_parameters()), model.config)
    return {name: tuple(x.shape) for name, x in ours.items()}


def test_published_experts_are_read_as_transformers_reads_them(
    folder: Path, tmp_path: Path
) -> None:
    family_checks.export_again(GptOss.family, folder, shapes(), tmp_path)
    theirs, ours = family_checks.stored(folder), family_checks.stored(tmp_path / "ours")
    for name in [name for name in theirs if name.endswith("_blocks")]:
        whole = name.removesuffix("_blocks")
        blocks, scales = theirs.pop(name), theirs.pop(f"{whole}_scales")
        theirs[whole] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_other_layer_has_the_window_where_none_are_named() -> None:
    from transformers import GptOssConfig

    config = GptOssConfig(num_hidden_layers=5, sliding_window=7)
    given = {**config.to_dict(), "rope_parameters": {"rope_theta": 1.0, "rope_type": "default"}}
    del given["layer_types"]
    known = {key.hf for key in GptOss.family.keys} | {"rope_parameters"}
    own = {"model_type": "gpt_oss", **{n: given[n] for n in known & given.keys()}}
    written = config_to_hf(GptOss.family, family_checks.run_config(GptOss.family, own))
    assert written["layer_types"] == config.layer_types


def test_blocks_without_scales_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = family_checks.stored(folder)
    lost = "model.layers.1.mlp.experts.down_proj"
    del tensors[f"{lost}_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{lost} is missing") as refusal:
        family_checks.export_again(GptOss.family, folder, shapes(), tmp_path)
    assert f"{lost}_blocks is unexpected" in str(refusal.value)
