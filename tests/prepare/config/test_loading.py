from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.plugin_api import ConfigError, PluginLoadError
from ascend_run.prepare.config.loading import build_config, read_raw
from tests.support.tiny_configs import SMALLEST, SwapOptions, build, config_with, problems_of


def test_each_value_comes_from_the_last_layer_that_has_it_and_says_so(file: Path) -> None:
    resolved = build(
        file,
        "model.hf_path=model",
        "model.family=llama",
        "model.num_layers=6",
        "plugins.swap.ratio=1",
        family={"model.normalization": "RMSNorm", "model.rotary_base": 1.0, "model.num_layers": 9},
        hf_values={"model.rotary_base": 5e5, "model.hidden_size": 999},
    )
    model, _parallel = resolved.config.model, resolved.config.parallel
    seen = {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "model.rotary_base": model.rotary_base,
        "model.normalization": model.normalization,
        "model.init_method_std": model.init_method_std,
        "parallel.expert_tensor_parallel_size": resolved.config.parallel[
            "expert_tensor_parallel_size"
        ],
        "run.seed": resolved.config.run.seed,
        "plugins.swap.ratio": resolved.config.plugins["swap"].ratio,
        "plugins.swap.mode": resolved.config.plugins["swap"].mode,
    }
    assert {key: (value, resolved.origins[key]) for key, value in seen.items()} == {
        "model.num_layers": (6, "command line"),
        "model.hidden_size": (64, "demo.toml:4"),
        "model.rotary_base": (5e5, "model/config.json"),
        "model.normalization": ("RMSNorm", "family 'llama'"),
        "model.init_method_std": (0.02, "Megatron's default"),
        "parallel.expert_tensor_parallel_size": (1, "default"),
        "run.seed": (1234, "default"),
        "plugins.swap.ratio": (1.0, "command line"),
        "plugins.swap.mode": ("sync", "plugin default"),
    }


def test_every_origin_of_the_config_is_known(file: Path) -> None:
    resolved = build(file)
    config = resolved.config
    keys = {"enable", "platform", "task"}
    for section in ("run", "data", "train", "optimizer", "checkpoint"):
        keys |= {f"{section}.{name}" for name in attrs.asdict(getattr(config, section))}
    keys |= {f"model.{name}" for name in config.model}
    keys |= {f"parallel.{name}" for name in config.parallel}
    keys |= {f"plugins.swap.{name}" for name in attrs.asdict(config.plugins["swap"])}
    assert keys <= resolved.origins.keys()


def test_the_sections_have_only_megatrons_supported_fields(file: Path) -> None:
    config = build(file).config
    assert config.parallel.tensor_model_parallel_size == 1
    assert config.model.moe_token_dispatcher_type == "alltoall"
    for name in ("activation_func", "init_method"):
        assert name not in config.model
    for name in ("bf16", "params_dtype", "timers"):
        assert name not in config.parallel


def test_nothing_in_a_config_can_be_changed(file: Path) -> None:
    config = build(file, "model.recompute_modules=core_attn,mlp").config
    assert config.model.recompute_modules == ("core_attn", "mlp")
    assert config.model.offload_modules == ()
    with pytest.raises(TypeError):
        config.plugins["swap"] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        config.model["num_layers"] = 3
    with pytest.raises(AttributeError):
        config.model.num_layers = 3
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert copy.deepcopy(config) == config


def test_all_problems_are_reported_at_once_with_their_location(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(
        """
[modle]
x = 1
[model]
num_layer = 2
num_layers = "3"
hidden_size = 0
num_attention_heads = 4
tensor_model_parallel_size = 2
activation_func = "gelu"
fp8 = "hybrid"
hidden_dropout = 1.5
moe_layer_freq = [1, "x"]
[train]
micro_batch_size = 0
precision = "fp8"
[plugins.swap]
min_bytes = "3 parsecs"
mode = "c"
foo = 1
[plugins.gmm]
x = 1
"""
    )
    assert problems_of(file, "run=3", "train.precsion=bf16", "foo.bar=1") == [
        "unknown section 'modle'; did you mean 'model'? (bad.toml:2)",
        "model.num_layer: unknown option; did you mean model.num_layers? (bad.toml:5)",
        (
            "model.tensor_model_parallel_size: unknown option; there is "
            "parallel.tensor_model_parallel_size (bad.toml:9)"
        ),
        (
            "plugins.swap.foo: unknown option; plugins.swap has min_bytes, ratio, layers, mode, "
            "folder, verbose (bad.toml:20)"
        ),
        "plugins.gmm.x: 'gmm' is not enabled; add it: --enable swap,gmm (bad.toml:22)",
        (
            "run: unknown section 'run'; there are enable, platform, task, run, model, parallel, "
            "data, train, ddp, optimizer, checkpoint, plugins (command line)"
        ),
        "train.precsion: unknown option; did you mean train.precision? (command line)",
        (
            "foo.bar: unknown section 'foo'; there are enable, platform, task, run, model, parallel, "  # noqa: E501
            "data, train, ddp, optimizer, checkpoint, plugins (command line)"
        ),
        "model.vocab_size is missing; expected a whole number",
        "model.num_layers='3': expected a whole number (bad.toml:6)",
        "model.hidden_size=0 must be above 0 (bad.toml:7)",
        "model.hidden_dropout=1.5 must be at least 0 and below 1 (bad.toml:12)",
        "model.activation_func cannot be set: it is a function; set model.activation (bad.toml:10)",
        (
            "model.fp8='hybrid' cannot be used: fp8 and fp4 are not supported yet; set "
            "train.precision (bad.toml:11)"
        ),
        (
            "model.moe_layer_freq=[1, 'x']: expected a whole number or a list of whole numbers "
            "(bad.toml:13)"
        ),
        (
            "plugins.swap.min_bytes='3 parsecs': expected a whole number of bytes or a size such as "  # noqa: E501
            '"1MiB" (bad.toml:18)'
        ),
        "train.micro_batch_size=0 must be > 0 (bad.toml:15)",
        "train.precision='fp8' must be one of ('bf16', 'fp16', 'fp32') (bad.toml:16)",
        "plugins.swap.mode='c' must be one of ('sync', 'async') (bad.toml:19)",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("parallel.use_ring_exchange_p2p=true", "a patched torch"),
        ("parallel.defer_embedding_wgrad_compute=true", "APEX"),
        ("model.fp4=e2m1", "fp8 and fp4 are not supported yet"),
        ("model.fp8_margin=3", "fp8 and fp4 are not supported yet"),
        ("parallel.tp_comm_overlap=true", "needs Transformer Engine"),
        ("parallel.bf16=true", "it follows train.precision; set that"),
        ("parallel.bf16=false", "it follows train.precision; set that"),
        ("model.attention_backend=flash", "the attention kernel is a plugin's"),
        ("parallel.timers=1", "it is a Python object"),
        ("model.moe_token_dispatcher_type=flex", "'flex' needs DeepEP"),
        ("model.moe_grouped_gemm=true", "grouped experts are a plugin's; see: ascend-run plugins"),
    ],
)
def test_what_is_not_supported_is_refused_with_one_sentence(
    file: Path, override: str, expected: str
) -> None:
    (problem,) = problems_of(file, override)
    assert expected in problem
    assert problem.startswith(override.split("=")[0])


@pytest.mark.parametrize(
    "override",
    [
        "parallel.pipeline_model_parallel_size=1",
        "parallel.tensor_model_parallel_size=4",
        "parallel.context_parallel_size=4",
        "parallel.expert_model_parallel_size=4",
        "parallel.sequence_parallel=true",
        "parallel.tp_comm_overlap=false",
        "model.recompute_granularity=selective",
        "model.window_size=[-1, 0]",
        "model.num_moe_experts=8",
    ],
)
def test_what_is_supported_is_taken(file: Path, override: str) -> None:
    key = override.split("=")[0]
    assert build(file, override).origins[key] == "command line"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("plugins.swap.min_bytes=1MiB", 2**20),
        ("plugins.swap.layers=1", (1,)),
        ("plugins.swap.layers=[1, 2]", (1, 2)),
        ("plugins.swap.folder=2024-01-01", "2024-01-01"),
        ("plugins.swap.folder=3", "3"),
        ("plugins.swap.folder=none", None),
        ("plugins.swap.mode=async", "async"),
        ("plugins.swap.verbose=True", True),
    ],
)
def test_the_command_line_needs_no_quotes(file: Path, override: str, value: object) -> None:
    config = build(file, override).config
    assert getattr(config.plugins["swap"], override.split("=")[0].split(".")[2]) == value


def test_a_file_needs_the_exact_type(file: Path) -> None:
    file.write_text(SMALLEST + '[plugins.swap]\nlayers = "1"\nfolder = 3\nverbose = "True"\n')
    assert [problem.split(":")[0] for problem in problems_of(file)] == [
        "plugins.swap.layers='1'",
        "plugins.swap.folder=3",
        "plugins.swap.verbose='True'",
    ]


def test_unset_is_for_what_may_be_unset(file: Path) -> None:
    assert (
        build(file, "model.num_query_groups=2", "model.num_query_groups=none").config.model[
            "num_query_groups"
        ]
        is None
    )
    (problem,) = problems_of(file, "model.linear_key_head_dim=none")
    assert problem == (
        "model.linear_key_head_dim cannot be unset; leave it out for 128 (command line)"
    )


def test_a_yaml_null_where_a_value_is_needed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {num_layers: , hidden_size: 64, num_attention_heads: 4, vocab_size: 9}\n"
    )
    assert problems_of(file) == ["model.num_layers=none: expected a whole number (c.yaml:1)"]


def test_a_plugin_that_is_nearly_named_is_suggested(file: Path) -> None:
    (problem,) = problems_of(file, "plugins.swapp.ratio=1")
    assert (
        problem
        == "plugins.swapp.ratio: 'swapp' is not enabled; did you mean 'swap'? (command line)"
    )


def test_a_family_that_sets_what_megatron_lacks_is_refused(file: Path) -> None:
    (problem,) = problems_of(file, family={"model.future_field": 1})
    assert problem == (
        "model.future_field: the installed Megatron has no such option (family 'llama')"
    )


def test_a_validator_that_compares_options_is_heard(file: Path) -> None:
    def below_limit(instance: Any, attribute: Any, value: int) -> None:
        if value >= instance.limit:
            raise ValueError(f"{attribute.name}={value} must be below limit={instance.limit}")

    @attrs.frozen(kw_only=True)
    class Options:
        limit: int = 3
        size: int = attrs.field(default=1, validator=below_limit)
        needed: int

    def resolve(*overrides: str) -> Any:
        raw = read_raw(file, overrides)
        return build_config(raw, {"own": Options}, {}, ()).config.plugins["own"]

    assert resolve("plugins.own.needed=1", "plugins.own.size=2").size == 2
    with pytest.raises(ConfigError, match=r"plugins\.own: size=7 must be below limit=3"):
        resolve("plugins.own.needed=1", "plugins.own.size=7")
    with pytest.raises(ConfigError, match=r"plugins\.own\.needed is missing"):
        resolve()


def test_options_that_are_no_attrs_class_are_the_plugins_fault(file: Path) -> None:
    with pytest.raises(PluginLoadError, match=r"plugins\.own: cannot read options"):
        build_config(read_raw(file), {"own": int}, {}, ())


def test_the_config_names_the_resolved_plugins(file: Path) -> None:
    raw = read_raw(file).replacing("--enable", enable=("alias",))
    resolved = build_config(raw, {"swap": SwapOptions}, {}, ("swap",))
    assert resolved.config.enable == ("swap",)
    assert resolved.origins["enable"] == "--enable"


def test_values_are_read_as_attributes() -> None:
    assert config_with(model__num_moe_experts=4).model.num_moe_experts == 4
