from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.families.windows import WINDOW_FROM
from ascend_run.plugin_api import ConfigError, ConfigKey, RunConfig
from ascend_run.prepare.hugging_face.config_keys import config_from_hf, config_to_hf
from tests.core.hugging_face.tiny_models import TinyModel
from tests.core.hugging_face.toy_families import DENSE as DENSE_FAMILY
from tests.core.hugging_face.toy_families import SPARSE as SPARSE_FAMILY
from tests.support.tiny_configs import model_fields, parallel_fields

DENSE, SPARSE = TinyModel(), TinyModel(experts=4)


def refusal(model: TinyModel, **changes: object) -> str:
    """The message with which a config.json with these changes is refused; ... removes a key."""
    config_json = model.config_json() | changes
    with pytest.raises(ConfigError) as caught:
        config_from_hf(model.family, {k: v for k, v in config_json.items() if v is not ...})
    return str(caught.value)


def as_run_config(family, values: dict) -> RunConfig:
    fields = {k.removeprefix("model."): v for k, v in {**family.defaults, **values}.items()}
    return RunConfig(model=model_fields(fields), parallel=parallel_fields())


def test_a_dense_config_becomes_our_fields() -> None:
    assert config_from_hf(DENSE_FAMILY, DENSE.config_json()) == {
        "model.vocab_size": 37,
        "model.hidden_size": 12,
        "model.ffn_hidden_size": 10,
        "model.num_layers": 2,
        "model.num_attention_heads": 4,
        "model.num_query_groups": 2,
        "model.kv_channels": 4,
        "model.max_position_embeddings": 64,
        "model.init_method_std": 0.02,
        "model.layernorm_epsilon": 1e-5,
        "model.rotary_base": 10000.0,
        "model.attention_dropout": 0.0,
        "model.share_embeddings_and_output_weights": False,
    }


def test_a_sparse_config_becomes_our_fields() -> None:
    values = config_from_hf(SPARSE_FAMILY, SPARSE.config_json())
    assert values["model.num_moe_experts"] == 4
    assert values["model.moe_router_topk"] == 2
    assert values["model.moe_aux_loss_coeff"] == 0.001
    assert values["model.moe_ffn_hidden_size"] == 10
    assert "model.ffn_hidden_size" not in values


def test_a_key_that_is_left_out_has_hugging_faces_default() -> None:
    small = {k: v for k, v in DENSE.config_json().items() if k not in ("rms_norm_eps", "head_dim")}
    values = config_from_hf(DENSE_FAMILY, small | {"hidden_size": 16})
    assert values["model.layernorm_epsilon"] == 1e-6
    assert values["model.kv_channels"] is None


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
    ],
)
def test_every_spelling_of_a_default_rope_is_read(spelling: dict) -> None:
    config_json = {k: v for k, v in DENSE.config_json().items() if k != "rope_parameters"}
    assert config_from_hf(DENSE_FAMILY, config_json | spelling)["model.rotary_base"] == 500000.0


SCALED = {
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 8.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
    "yarn of deepseek": {
        "rope_type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7,
        "mscale_all_dim": 0.7, "original_max_position_embeddings": 16,
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0], "attention_factor": 1.1,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
def test_a_scaled_rope_becomes_our_fields_and_goes_back(name: str, spelling: str) -> None:
    parameters = {"rope_type": name, **SCALED[name]}
    if spelling == "type":
        parameters["type"] = parameters.pop("rope_type")
    key = "rope_parameters" if spelling == "rope_parameters" else "rope_scaling"
    config_json = {k: v for k, v in DENSE.config_json().items() if k != "rope_parameters"}
    config_json |= {"rope_theta": 1e4, key: parameters}
    values = config_from_hf(DENSE_FAMILY, config_json)
    kind = parameters.get("rope_type", parameters.get("type"))
    assert values["model.rope_scaling_type"] == kind
    for field, value in SCALED[name].items():
        if field != "rope_type":
            want = tuple(value) if isinstance(value, list) else value
            assert values[f"model.rope_scaling_{field}"] == want
    written = config_to_hf(DENSE_FAMILY, as_run_config(DENSE_FAMILY, values))
    assert written["rope_parameters"] == written["rope_scaling"]
    assert written["rope_parameters"]["rope_type"] == kind
    assert config_from_hf(DENSE_FAMILY, written) == values


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"rope_type": "ntk"}, "rope_parameters.rope_type is 'ntk'; only 'default' and 'linear'"),
        ({"rope_type": "yarn", "type": "linear"}, "rope_parameters has two types"),
        ({"rope_type": "linear"}, "rope_parameters.factor is missing; linear positions need it"),
        ({"rope_type": "linear", "factor": -1}, "rope_parameters.factor is -1; expected a number"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1.0}, "unknown key rope_parameters.b"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": 2.0},
            "rope_parameters.long_factor is 2.0; expected a list",
        ),
    ],
    ids=str,
)
def test_a_scaled_rope_that_would_be_read_wrong_is_refused(parameters: dict, expected: str) -> None:
    assert expected in refusal(DENSE, rope_parameters={"rope_theta": 1e4, **parameters})


def test_two_scalings_of_one_model_are_refused() -> None:
    linear, other = ({"rope_type": "linear", "factor": factor} for factor in (2.0, 4.0))
    message = refusal(DENSE, rope_parameters={"rope_theta": 1e4, **linear}, rope_scaling=other)
    assert "scale positions differently" in message


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0"),
        ({"mrope_section": [1, 2]}, "unknown key rope_parameters.mrope_section"),
        ([10000.0], "rope_parameters is [10000.0]; expected an object or null"),
        ({"rope_theta": 1e6}, "two different rotary bases"),
        ({"rope_theta": "large"}, "two different rotary bases"),
    ],
)
def test_a_rope_that_would_be_read_wrong_is_refused(parameters: object, expected: str) -> None:
    assert expected in refusal(DENSE, rope_parameters=parameters, rope_theta=10000.0)


def test_every_fault_of_a_config_stands_in_one_message() -> None:
    message = refusal(
        SPARSE,
        hidden_size=...,
        num_hidden_layer=2,
        quantization_config={},
        sliding_window=4096,
        num_local_experts="four",
        architectures=["MixtralForSequenceClassification"],
    )
    for expected in (
        "hidden_size is missing; ToySparseForCausalLM needs it",
        "unknown key 'num_hidden_layer'; did you mean 'num_hidden_layers'",
        "quantization_config: quantised weights are not read; save them dequantised",
        "sliding_window is 4096; only None is supported",
        "num_local_experts is 'four'; expected a whole number above 0",
        "architectures is ['MixtralForSequenceClassification']",
    ):
        assert expected in message
    assert len(message.splitlines()) == 7


@pytest.mark.parametrize(
    ("key", "count", "most"),
    [
        ("num_hidden_layers", 10_001, 10_000),
        ("num_hidden_layers", 10**9, 10_000),
        ("num_local_experts", 10**9, 100_000),
        ("vocab_size", 2**31, 2**31 - 1),
    ],
)
def test_counts_above_what_can_be_planned_are_refused(key: str, count: int, most: int) -> None:
    """Before the list of the windows of each layer is built, which would exhaust the memory."""
    key_of_window = ConfigKey(
        hf="max_window_layers", field="model.window_attn_skip_freq", default=1, form=WINDOW_FROM
    )
    family = attrs.evolve(SPARSE_FAMILY, keys=(*SPARSE_FAMILY.keys, key_of_window))
    with pytest.raises(ConfigError) as caught:
        config_from_hf(family, SPARSE.config_json() | {key: count})
    assert [*caught.value.problems] == [f"{key} is {count}; expected at most {most}"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("attention_bias", 0),  # 0 == False, but it is not what Hugging Face writes
        ("tie_word_embeddings", "yes"),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 2.0),
        ("num_hidden_layers", 10**400),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 10**400),
        ("rms_norm_eps", -1e-5),
        ("rope_theta", "large"),
        ("vocab_size", None),
        ("model_type", "mistral"),
    ],
)
def test_a_value_that_cannot_be_represented_is_refused(key: str, value: object) -> None:
    changes = {key: value} | ({"rope_parameters": ...} if key == "rope_theta" else {})
    message = refusal(DENSE, **changes)
    assert f"{key} is {value!r}" in message
    assert len(message.splitlines()) == 2


def test_heads_that_do_not_divide_are_refused() -> None:
    assert "num_key_value_heads is 3; it must divide" in refusal(DENSE, num_key_value_heads=3)
    assert "without a head_dim" in refusal(DENSE, head_dim=None, hidden_size=13)


@st.composite
def config_jsons(draw: st.DrawFn) -> tuple[TinyModel, dict]:
    groups = draw(st.integers(1, 8))
    model = TinyModel(
        layers=draw(st.integers(1, 200)),
        hidden=draw(st.integers(1, 2**15)),
        groups=groups,
        heads_per_group=draw(st.integers(1, 8)),
        head_dim=draw(st.integers(1, 256)),
        ffn=draw(st.integers(1, 2**16)),
        vocab=draw(st.integers(1, 2**18)),
        experts=draw(st.sampled_from([0, 2, 8, 64])),
        tied=draw(st.booleans()),
    )
    floats = st.floats(0.0, 1e9, allow_nan=False)
    changes = {
        "rms_norm_eps": draw(floats),
        "initializer_range": draw(floats),
        "attention_dropout": draw(floats),
        "rope_parameters": {"rope_theta": draw(floats), "rope_type": "default"},
        "max_position_embeddings": draw(st.integers(1, 2**22)),
    }
    return model, model.config_json() | changes


@settings(max_examples=200, deadline=None)
@given(config_jsons())
def test_writing_a_config_undoes_reading_it(drawn: tuple[TinyModel, dict]) -> None:
    model, config_json = drawn
    values = config_from_hf(model.family, config_json)
    written = config_to_hf(model.family, as_run_config(model.family, values))
    assert config_from_hf(model.family, written) == values
    kept = {k: v for k, v in config_json.items() if k not in model.family.ignored}
    assert written == kept | {"rope_theta": config_json["rope_parameters"]["rope_theta"]}


def test_fields_left_at_none_are_written_as_megatron_derives_them() -> None:
    config = DENSE.run_config(
        kv_channels=None, num_query_groups=None, ffn_hidden_size=None, max_position_embeddings=None
    )
    written = config_to_hf(DENSE_FAMILY, config)
    assert written["head_dim"] == 3
    assert written["num_key_value_heads"] == 4
    assert written["intermediate_size"] == 48
    assert written["max_position_embeddings"] == config.data.seq_length


def test_a_model_that_transformers_could_not_compute_is_not_written() -> None:
    with pytest.raises(ConfigError) as caught:
        config_to_hf(
            DENSE_FAMILY,
            DENSE.run_config(
                normalization="LayerNorm", qk_layernorm=True, rotary_percent=0.5, num_moe_experts=4
            ),
        )
    message = str(caught.value)
    for expected in (
        "model.normalization is 'LayerNorm'; ToyDenseForCausalLM has only 'RMSNorm'",
        "model.qk_layernorm is True",
        "model.rotary_percent is 0.5",
        "model.num_moe_experts is 4",
    ):
        assert expected in message


def test_what_only_training_needs_does_not_stop_an_export() -> None:
    config = SPARSE.run_config(hidden_dropout=0.1, moe_router_load_balancing_type="none")
    assert config_to_hf(SPARSE_FAMILY, config)["num_local_experts"] == 4


def test_a_written_config_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size is None"):
        config_to_hf(DENSE_FAMILY, DENSE.run_config(vocab_size=None))
