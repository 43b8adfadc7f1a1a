"""Models whose parameters Megatron's formats can name, and whose switches Megatron lacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ascend_run.plugin_api import RunConfig
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.tools.convert.formats.latent_attention import require_megatron_attention
from ascend_run.tools.convert.formats.parameter_shards import require_known
from tests.plugins.models.cases import BY_NAME
from tests.support.family_checks import stored
from tests.support.tiny_configs import model_fields, parallel_fields

from .test_mp_rank import check_equal, convert

LATENT = {"multi_latent_attention": True, "layernorm_epsilon": 1e-5}
OF_ATTENTION = {"add_qkv_bias": True, "add_linear_proj_bias": True}
SPARSE = {"num_moe_experts": 2}


def config_of(fields: Mapping[str, object]) -> RunConfig:
    return RunConfig(model=model_fields(dict(fields)), parallel=parallel_fields())


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {**SPARSE, "add_expert_bias": True, "add_router_bias": True},
            "model.add_qkv_bias, model.add_linear_proj_bias=false with model.add_router_bias, ",
        ),
        ({"add_mlp_bias": True}, "model.add_qkv_bias, model.add_linear_proj_bias=false with "),
        (
            {"add_mlp_bias": True, "add_qkv_bias": True},
            "model.add_linear_proj_bias=false with model.add_qkv_bias, model.add_mlp_bias=true: ",
        ),
        (
            {**SPARSE, "moe_layer_freq": (0, 1), **OF_ATTENTION, "add_mlp_bias": True},
            "model.add_router_bias, model.add_expert_bias=false with ",
        ),
        (
            {"activation": "quick_gelu", "quick_gelu_alpha": 1.5},
            "model.quick_gelu_alpha=1.5: Megatron's quick GELU has the factor 1.702, and no option",
        ),
    ],
)
def test_a_switch_that_megatron_lacks_is_named(fields: Mapping[str, object], problem: str) -> None:
    config = config_of({"num_layers": 2, "add_bias_linear": False, **fields})
    with pytest.raises(CheckpointError) as caught:
        require_known([], config, "torch_dist")
    (found,) = caught.value.problems
    assert found.startswith(problem)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_qkv_bias": True},
        {"add_linear_proj_bias": True},
        OF_ATTENTION,
        {**OF_ATTENTION, "add_mlp_bias": True},
        {"add_bias_linear": True},
        {**SPARSE, **OF_ATTENTION},
        {**SPARSE, "add_bias_linear": True},
        {"activation": "quick_gelu"},
    ],
)
def test_switches_that_megatron_or_mindspeed_has(fields: Mapping[str, object]) -> None:
    require_known([], config_of({"num_layers": 2, "add_bias_linear": False, **fields}), "files")


@pytest.mark.parametrize(
    ("fields", "problems"),
    [
        ({"latent_layernorm_epsilon": 1e-6}, ["model.latent_layernorm_epsilon=1e-06 with "]),
        ({"latent_rotary_interleaved": False}, ["model.latent_rotary_interleaved=false: "]),
        ({"latent_layernorm_epsilon": 1e-5}, []),
        ({}, []),
    ],
)
def test_latent_attention_of_megatron_has_these_switches(
    fields: Mapping[str, object], problems: list[str]
) -> None:
    config = config_of({**LATENT, **fields})
    if not problems:
        require_megatron_attention(config)
        return
    with pytest.raises(CheckpointError, match="--mla-qkv-concat") as caught:
        require_megatron_attention(config)
    assert len(caught.value.problems) == len(problems)
    assert all(map(str.startswith, caught.value.problems, problems))


@pytest.mark.parametrize("words", ["mp-rank --tp 2", "torch-dist"])
def test_a_bias_of_the_output_projection_alone_returns(words: str, tmp_path: Path) -> None:
    """By MindSpeed's option: the args alone build the same model."""
    folder = tmp_path / "hf"
    BY_NAME["llama"].model(attention_bias=True).save_pretrained(folder)  # type: ignore[operator]
    command = ("--to", *words.split(), "--verify", "logits")
    assert convert(*command, folder, tmp_path / "out") == 0
    (tmp_path / "out" / "config.toml").unlink()
    assert convert("--to", "hf", "--family", "llama", tmp_path / "out", tmp_path / "back") == 0
    want = stored(folder)
    assert want["model.layers.0.self_attn.o_proj.bias"].any()
    check_equal(stored(tmp_path / "back"), want)
