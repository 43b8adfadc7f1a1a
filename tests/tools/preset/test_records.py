"""The records of published models: parameter counts, names, and what each family makes of them.

The counts are derived here from the published architectures, by formulas that share nothing with
the cost model, and compared with its counts, with the records' and with the published figures.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.config.layout import layout_of
from ascend_run.plugin_api import ConfigError, ModelFamily
from ascend_run.plugin_api.expert_layers import moe_layers
from ascend_run.prepare.config.loading import build_config
from ascend_run.prepare.hugging_face.config_keys import config_from_hf
from ascend_run.prepare.prepare import prepare_raw
from ascend_run.registry.discovery import discover
from ascend_run.text.template_records import NAMED
from ascend_run.tools.plan.cost_model.parameters import rank_parameters
from ascend_run.tools.plan.cost_model.sizes import sizes_of
from ascend_run.tools.plan.costs import with_costs
from ascend_run.tools.preset.presets import Preset, find_preset, presets
from ascend_run.tools.preset.run_file import toml
from ascend_run.tools.preset.runs import Request, raw_config, run_values
from tests.support.needed_plugins import names_of

from .variants import NO_CONFIG, VARIANTS

Config = Mapping[str, Any]
UNITS = {"M": 10**6, "B": 10**9}


def attention(c: Config, *, qkv_bias: bool = False, out_bias: bool = False) -> int:
    """Weights of grouped-query attention: queries and output, keys and values, biases."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    groups = c.get("num_key_value_heads", heads)
    width = c.get("head_dim", hidden // heads)
    queries, keys = heads * width, groups * width
    biases = (queries + 2 * keys) * qkv_bias + hidden * out_bias
    return 2 * hidden * queries + 2 * hidden * keys + biases


def decoder(
    c: Config,
    *,
    tied: bool = False,
    norms: int = 2,
    head_norms: bool = False,
    mlp: int | None = None,
    **biases: bool,
) -> int:
    """A Llama-like decoder: embeddings, layers of attention, gated MLP and norms, a last norm."""
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    width = c.get("head_dim", hidden // c["num_attention_heads"])
    tables = 1 if c.get("tie_word_embeddings", tied) else 2
    feed_forward = 3 * hidden * c["intermediate_size"] if mlp is None else mlp
    layer = attention(c, **biases) + feed_forward + norms * hidden + 2 * width * head_norms
    return tables * c["vocab_size"] * hidden + layers * layer + hidden


def gpt2(c: Config) -> int:
    """12 h^2 + 13 h a layer, tables of tokens and positions, and a last norm with bias."""
    hidden, layers = c["n_embd"], c["n_layer"]
    tables = (c["vocab_size"] + c["n_positions"]) * hidden
    return tables + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def bloom(c: Config) -> int:
    """As GPT-2, without positions and with a norm of the embeddings."""
    hidden, layers = c["hidden_size"], c["n_layer"]
    return c["vocab_size"] * hidden + layers * (12 * hidden**2 + 13 * hidden) + 4 * hidden


def chatglm(c: Config) -> int:
    """Multi-query attention with biases on q, k and v, and a gated MLP."""
    hidden, width = c["hidden_size"], c["kv_channels"]
    projected = hidden + 2 * c["multi_query_group_num"] * width
    layer = hidden * projected + projected + hidden**2 + 3 * hidden * c["ffn_hidden_size"]
    return 2 * c["padded_vocab_size"] * hidden + c["num_layers"] * (layer + 2 * hidden) + hidden


def experts(c: Config, count: int, width: int, shared: int = 0, gate: bool = False) -> int:
    """A router's weight, the experts' gated MLPs and those that all tokens use."""
    hidden = c["hidden_size"]
    return count * hidden + 3 * hidden * (count * width + shared) + hidden * gate


def qwen2_moe(c: Config) -> int:
    shared = c["shared_expert_intermediate_size"]
    mlp = experts(c, c["num_experts"], c["moe_intermediate_size"], shared, gate=True)
    return decoder(c, mlp=mlp, qkv_bias=True)


def qwen3_moe(c: Config) -> int:
    mlp = experts(c, c["num_experts"], c["moe_intermediate_size"])
    return decoder(c, mlp=mlp, head_norms=True)


def latent_attention(c: Config) -> int:
    """Projections of latents, down and up, the norms of latents, and the output."""
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    plain, rotated = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    value = c.get("v_head_dim", hidden // heads)
    rank = c["q_lora_rank"]
    queries = (rank or hidden) * heads * (plain + rotated) + (rank or 0) * (hidden + 1)
    down, up = hidden * (latent + rotated) + latent, latent * heads * (plain + value)
    return queries + down + up + heads * value * hidden


def minicpm3(c: Config) -> int:
    hidden = c["hidden_size"]
    layer = latent_attention(c) + 3 * hidden * c["intermediate_size"] + 2 * hidden
    return c["vocab_size"] * hidden + c["num_hidden_layers"] * layer + hidden


def deepseek(c: Config) -> int:
    """Dense layers first, then experts."""
    hidden, layer = c["hidden_size"], latent_attention(c) + 2 * c["hidden_size"]
    dense, layers = c["first_k_dense_replace"], c["num_hidden_layers"]
    width = c["moe_intermediate_size"]
    mlps = dense * 3 * hidden * c["intermediate_size"]
    mlps += (layers - dense) * experts(
        c, c["n_routed_experts"], width, c["n_shared_experts"] * width
    )
    return 2 * c["vocab_size"] * hidden + layers * layer + mlps + hidden


def gpt_oss(c: Config) -> int:
    """Biases everywhere but in norms, and a logit of each head for its sink."""
    hidden, count, width = c["hidden_size"], c["num_local_experts"], c["intermediate_size"]
    mlp = experts(c, count, width) + count * (1 + 2 * width + hidden)
    more = c["num_hidden_layers"] * c["num_attention_heads"]
    return decoder(c, mlp=mlp, qkv_bias=True, out_bias=True) + more


def phimoe(c: Config) -> int:
    """LayerNorm's biases, and those of attention and output layer."""
    mlp = experts(c, c["num_local_experts"], c["intermediate_size"])
    norms = decoder(c, mlp=mlp, norms=4, qkv_bias=True, out_bias=True)
    return norms + c["hidden_size"] + c["vocab_size"]


FORMULAS: dict[str, Callable[[Config], int]] = {
    "aquila": decoder,
    "baichuan": decoder,
    "baichuan2": decoder,
    "baichuan2_13b": decoder,
    "baichuan_13b": decoder,
    "bloom": bloom,
    "chatglm": chatglm,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gemma": lambda c: decoder(c, tied=True),
    "gemma2": lambda c: decoder(c, tied=True, norms=4),
    "gpt2": gpt2,
    "gpt_oss": gpt_oss,
    "grok1": lambda c: decoder(
        c, tied=True, norms=4, mlp=experts(c, c["num_experts"], c["intermediate_size"])
    ),
    "internlm": lambda c: decoder(c, qkv_bias=True, out_bias=True),
    "internlm2": decoder,
    "internlm3": decoder,
    "llama": decoder,
    "minicpm": lambda c: decoder(c, tied=True),
    "minicpm3": minicpm3,
    "minicpm_moe": lambda c: decoder(
        c, tied=True, mlp=experts(c, c["num_experts"], c["intermediate_size"])
    ),
    "mistral": decoder,
    "mixtral": lambda c: decoder(c, mlp=experts(c, c["num_local_experts"], c["intermediate_size"])),
    "phi3": decoder,
    "phimoe": phimoe,
    "qwen": lambda c: decoder(
        {**c, "intermediate_size": c["intermediate_size"] // 2}, qkv_bias=True
    ),
    "qwen2": lambda c: decoder(c, qkv_bias=True),
    "qwen2_moe": qwen2_moe,
    "qwen3": lambda c: decoder(c, head_norms=True),
    "qwen3_moe": qwen3_moe,
}


@pytest.fixture(scope="module")
def families() -> dict[str, ModelFamily]:
    catalogue = discover()
    names = sorted({p.family for p in presets().values() if p.family in catalogue})
    loaded = catalogue.load(names)
    return {name: loaded[name].family for name in names}


def counted(preset: Preset, family: ModelFamily) -> int:
    """Parameters by the cost model, on one rank and without padding of the vocabulary."""
    values = config_from_hf(family, preset.config_json)
    given = {**values, "model.make_vocab_size_divisible_by": 1}
    config = build_config(raw_config(given, "test"), {}, family.defaults, ()).config
    layout, layers = layout_of(config, 1), range(config.model.num_layers)
    parameters = rank_parameters(
        config,
        layout,
        sizes_of(config, layout),
        layers,
        moe_layers(config.model),
        is_first=True,
        is_last=True,
    )
    return sum(parameter.numel for parameter in parameters)


def model_of(values: Mapping[str, Any], family: ModelFamily) -> Any:
    """The resolved ``[model]`` section of some values."""
    return build_config(raw_config(values, "test"), {}, family.defaults, ()).config.model


@pytest.mark.parametrize("name", names_of(presets(), lambda preset: (preset.family,)))
def test_parameters_are_those_of_the_formula_and_as_published(
    name: str, families: Mapping[str, ModelFamily]
) -> None:
    preset = presets()[name]
    exact = FORMULAS[preset.family](preset.config)
    assert preset.parameters == exact
    assert counted(preset, families[preset.family]) == exact

    if preset.published_without_embedding:
        exact -= preset.config["vocab_size"] * preset.config["hidden_size"]
    digits, unit = preset.published[:-1], UNITS[preset.published[-1]]
    last = 10.0 ** -len(digits.partition(".")[2])
    over = (exact / unit - float(digits)) / last
    low, high = (0.5, 1.0) if preset.published_cut_off else (-0.5, 0.5)
    assert low <= over < high, "differs from the published figure in its last digit"


@pytest.mark.parametrize("name", names_of(presets(), lambda preset: (preset.family,)))
def test_every_preset_plans_with_all_its_parameters(name: str) -> None:
    """Data parallelism over one node, whether or not it fits there."""
    request = Request(preset=presets()[name], devices=8)
    values = run_values(request, 8) | {"model.make_vocab_size_divisible_by": 1}
    plan: Any = with_costs(prepare_raw(raw_config(values, "test"), 8), "ascend-910b").plan
    (stage,) = plan.cost.stages
    assert stage.parameters == stage.trained_parameters == presets()[name].parameters
    assert min(stage.flops, stage.memory.peak, plan.cost.time.step) > 0


def of_each_form() -> dict[str, Preset]:
    """One preset for each family and set of keys."""
    forms = {(p.family, *sorted(p.config)): p for p in presets().values()}
    return {preset.name: preset for preset in forms.values()}


@pytest.mark.parametrize("name", names_of(of_each_form(), lambda preset: (preset.family,)))
def test_a_run_file_has_the_model_of_its_hugging_face_folder(
    name: str, families: Mapping[str, ModelFamily]
) -> None:
    preset = presets()[name]
    family = families[preset.family]
    written = tomllib.loads(toml(run_values(Request(preset=preset, devices=8), 8)))["model"]
    given = {f"model.{key}": value for key, value in written.items()}
    own = {"model.family": preset.family}
    from_folder = model_of({**own, **config_from_hf(family, preset.config_json)}, family)
    assert dict(model_of(given, family)) == dict(from_folder)


def test_longrope_has_a_factor_of_each_pair_of_a_head() -> None:
    found = {}
    for preset in presets().values():
        config, scaling = preset.config, preset.config.get("rope_scaling") or {}
        if scaling.get("type", scaling.get("rope_type")) == "longrope":
            width = config.get("qk_rope_head_dim") or config["hidden_size"] // config[
                "num_attention_heads"
            ] * config.get("partial_rotary_factor", 1.0)
            lengths = {len(scaling["short_factor"]), len(scaling["long_factor"])}
            found[preset.name] = lengths == {width // 2}
    assert {"phi-3.5-mini", "phi-3.5-moe", "minicpm3-4b"} <= found.keys()
    assert all(found.values()), found


def test_templates_are_named_ones() -> None:
    assert {preset.template for preset in presets().values()} <= {*NAMED, None}


def test_names_are_words_of_letters_digits_dots_and_dashes() -> None:
    odd = [name for name in presets() if not re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", name)]
    assert not odd


def test_sizes_of_a_series_are_sorted_by_number() -> None:
    series = [name for name in presets() if re.fullmatch(r"qwen2\.5-[0-9.]+b", name)]
    sizes = ("0.5", "1.5", "3", "7", "14", "32", "72")
    assert series == [f"qwen2.5-{size}b" for size in sizes]


def test_a_run_is_no_longer_than_the_context() -> None:
    for preset in presets().values():
        assert 0 < preset.default_seq_length <= preset.context, preset.name


def test_find_preset_ignores_case_and_names_the_nearest() -> None:
    assert find_preset("Qwen2.5-7B").name == "qwen2.5-7b"
    with pytest.raises(ConfigError, match=r"no preset 'lama-2-7b'; did you mean llama-2-7b or"):
        find_preset("lama-2-7b")
    with pytest.raises(ConfigError, match="no preset 'zzz'; see ascend-run preset list"):
        find_preset("zzz")


def test_every_record_is_package_data() -> None:
    root = Path(__file__).parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "records/*.toml" in data["package-data"]["ascend_run.tools.preset"]


def test_every_published_variant_has_a_preset_or_a_reason() -> None:
    listed = [pair for sizes in VARIANTS.values() for pair in sizes.items()]
    assert len(listed) == 99
    missing = [preset for _, preset in listed if preset == NO_CONFIG]
    assert len(missing) == 2
    named = {preset for _, preset in listed} - {NO_CONFIG}
    assert named <= presets().keys()
