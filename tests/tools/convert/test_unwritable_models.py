"""Models whose parameters Megatron's formats can name, and whose switches Megatron lacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ascend_run.plugin_api import RunConfig
from ascend_run.plugin_api.errors import CheckpointError
from ascend_run.tools.convert.formats.latent_attention import require_megatron_attention
from ascend_run.tools.convert.formats.megatron_switches import require_stated
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
        ({"scale_embedding": True}, "model.scale_embedding=true multiplies embeddings by the "),
        ({"embedding_multiplier": 12.0}, "model.embedding_multiplier=12.0 multiplies embeddings; "),
        ({"residual_multiplier": 0.22}, "model.residual_multiplier=0.22 multiplies the output of "),
        ({"logits_scaling": 8.0}, "model.logits_scaling=8.0 divides the logits; Megatron's GPT"),
        ({"normalize_output_rows": True}, "model.normalize_output_rows=true divides the rows of "),
        ({"num_labels": 1}, "model.num_labels=1 replaces the output layer by a score head"),
        ({"final_logit_softcapping": 30.0}, "model.final_logit_softcapping=30.0 caps the logits; "),
        ({"attn_logit_softcapping": 50.0}, "model.attn_logit_softcapping=50.0 caps the attention "),
        ({"log_n_scaling_length": 64}, "model.log_n_scaling_length=64 multiplies queries beyond "),
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
        {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
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


def test_every_factor_of_a_model_is_named_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"embedding_multiplier": 3.0, "residual_multiplier": 1.0, "logits_scaling": 0.5}
    BY_NAME["granite"].model(**changes).save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    assert convert("--to", "torch-dist", tmp_path / "hf", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "this model cannot be written as a torch_dist checkpoint; use --to hf or" in said
    named = [name for name in changes if f"model.{name}=" in said]
    assert named == ["embedding_multiplier", "logits_scaling"]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_factors_of_one_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    factors = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    model = BY_NAME["granite"].model(**dict.fromkeys(factors, 1.0))
    model.save_pretrained(folder)  # type: ignore[operator]
    assert convert("--to", "mp-rank", "--verify", "logits", folder, tmp_path / "out") == 0
    assert convert("--to", "hf", tmp_path / "out", tmp_path / "back") == 0
    check_equal(stored(tmp_path / "back"), stored(folder))


def test_args_that_do_not_say_what_a_family_adds_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of Megatron say nothing of the factor on Gemma's embedding; ours of earlier did."""
    BY_NAME["llama"].model().save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    assert convert("--to", "mp-rank", tmp_path / "hf", tmp_path / "out") == 0
    (tmp_path / "out" / "config.toml").unlink()
    assert convert("--to", "hf", "--family", "gemma", tmp_path / "out", tmp_path / "back") == 2
    said = capsys.readouterr().err
    assert "with --config" in said
    assert "model.scale_embedding=true multiplies embeddings" in said
    assert not (tmp_path / "back").exists()

    config = config_of({"scale_embedding": True, "logits_scaling": 2.0})
    require_stated(config, {"scale_embedding": True, "logits_scaling": 2.0}, "files")
    with pytest.raises(CheckpointError) as caught:
        require_stated(config, {"scale_embedding": True, "logits_scaling": None}, "files")
    (found,) = caught.value.problems
    assert found.startswith("model.logits_scaling=2.0 divides the logits")


@pytest.mark.parametrize("mlp_bias", [False, True])
@pytest.mark.parametrize("words", ["mp-rank --tp 2", "torch-dist"])
def test_biases_return_from_the_args_alone(words: str, mlp_bias: bool, tmp_path: Path) -> None:
    """Those of attention alone by MindSpeed's option, all by Megatron's."""
    folder = tmp_path / "hf"
    model = BY_NAME["llama"].model(attention_bias=True, mlp_bias=mlp_bias)
    model.save_pretrained(folder)  # type: ignore[operator]
    command = ("--to", *words.split(), "--verify", "logits")
    assert convert(*command, folder, tmp_path / "out") == 0
    (tmp_path / "out" / "config.toml").unlink()
    assert convert("--to", "hf", "--family", "llama", tmp_path / "out", tmp_path / "back") == 0
    want = stored(folder)
    assert want["model.layers.0.self_attn.o_proj.bias"].any()
    assert ("model.layers.0.mlp.up_proj.bias" in want) is mlp_bias
    check_equal(stored(tmp_path / "back"), want)
