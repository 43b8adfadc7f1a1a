"""Errors raised before a run starts."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.hooks import Hooks
from ascend_run.ops.linear.peft_base import metadata_of
from ascend_run.ops.weight_sources import weights_digest
from ascend_run.plugin_api import CheckpointError, Layout, RunConfig
from ascend_run.plugins.fine_tuning.lora import Lora, LoraOptions
from ascend_run.plugins.fine_tuning.lora.base import BaseRecord
from ascend_run.plugins.fine_tuning.lora.peft_config import peft_config
from ascend_run.types.config import RunSection
from tests.support.tiny_configs import model_fields, parallel_fields

MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def problems(options: dict[str, Any], output_dir: str = "runs/x", **model: Any) -> list[str]:
    values = {
        "family": "llama",
        "num_layers": 1,
        "num_moe_experts": None,
        "gated_linear_unit": True,
        "moe_layer_freq": 1,
        "hf_path": None,
        **model,
    }
    config = RunConfig(
        run=RunSection(output_dir=output_dir),
        model=model_fields(values),
        parallel=parallel_fields(),
    )
    results = Hooks([Lora(LoraOptions(**options))]).contributions(
        "ascend_check", config=config, layout=Layout()
    )
    return [problem for _, found in results for problem in found]


def write_header(
    folder: Path,
    modules: tuple[str, ...] = MODULES,
    num_layers: int = 1,
    metadata: Mapping[str, str] | None = None,
    **config: Any,
) -> str:
    """Write an adapter's config and the header of its tensors, which is all that a check reads."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [
        f"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight"
        for layer in range(num_layers)
        for module in modules
        for part in "AB"
    ]
    header = json.dumps(
        {**{name: {"shape": [8, 8]} for name in names}, "__metadata__": metadata or {}}
    ).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    stored = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **config}
    (folder / "adapter_config.json").write_text(json.dumps(stored))
    return str(folder)


def test_sound_options_raise_no_problem(tmp_path: Path) -> None:
    assert problems({}) == []
    assert problems({"load": write_header(tmp_path)}) == []
    assert problems({"target_modules": ("linear_q", "linear_fc1_up")}) == []
    assert problems({}, family="mixtral", num_moe_experts=4) == []
    sparse = {"num_moe_experts": 4, "num_layers": 2}
    for frequency in (2, [1, 0], [0, 1]):
        found = problems({"target_modules": ("linear_fc1",)}, moe_layer_freq=frequency, **sparse)
        assert found == []


def test_unknown_targets_are_named_with_the_known_ones() -> None:
    found = problems({"target_modules": ("q_proj", "linear_qkv", "linear_fc3")})
    assert len(found) == 2
    assert "; expected some of all-linear, linear_qkv, linear_q," in found[0]
    assert "names 'linear_fc3'" in found[1]
    assert "is empty" in problems({"target_modules": ()})[0]
    ungated = problems({"target_modules": ("linear_fc1_gate",)}, gated_linear_unit=False)
    assert "names 'linear_fc1_gate'" in ungated[0]


@pytest.mark.parametrize(
    ("theirs", "ours", "model"),
    [
        ("q_proj", "linear_q", {}),
        ("v_proj", "linear_v", {"family": "qwen3"}),
        ("o_proj", "linear_proj", {}),
        ("up_proj", "linear_fc1_up", {}),
        ("down_proj", "linear_fc2", {}),
        ("qkv_proj", "linear_qkv", {"family": "phi3"}),
        ("gate_up_proj", "linear_fc1", {"family": "phi3"}),
        ("c_fc", "linear_fc1", {"family": "gpt2", "gated_linear_unit": False}),
        ("q_proj", "linear_q_proj", {"multi_latent_attention": True, "q_lora_rank": None}),
        ("kv_b_proj", "linear_kv_up_proj", {"multi_latent_attention": True}),
    ],
)
def test_names_of_peft_are_answered_with_ours(
    theirs: str, ours: str, model: dict[str, Any]
) -> None:
    (found,) = problems({"target_modules": (theirs,)}, **model)
    assert f"names '{theirs}' (did you mean {ours}, as PEFT's {theirs} is named here?)" in found
    assert problems({"target_modules": (ours,)}, **model) == []


def test_names_of_other_things_are_not_guessed_at() -> None:
    (found,) = problems({"target_modules": ("kv_b_proj",)})
    assert "names 'kv_b_proj'; expected" in found
    (found,) = problems({"target_modules": ("linear_q_up_proj",)})
    assert "did you mean" not in found


def test_a_target_is_named_once() -> None:
    (found,) = problems({"target_modules": ("linear_q", "linear_proj", "linear_q")})
    assert "target_modules names 'linear_q' twice; expected it once" in found
    assert problems({"target_modules": ("linear_qkv", "linear_q")}) == []


LATENT = {"family": "deepseek_v2", "multi_latent_attention": True, "q_lora_rank": 12}


def test_targets_are_linears_of_the_models_attention() -> None:
    for name in ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj"):
        assert problems({"target_modules": (name,)}, **LATENT) == []
        (found,) = problems({"target_modules": (name,)})
        assert f"names '{name}'; expected some of all-linear, linear_qkv, linear_q," in found
    (found,) = problems({"target_modules": ("linear_qkv",)}, **LATENT)
    assert "expected some of all-linear, linear_q_down_proj, linear_q_up_proj, linear_kv_d" in found
    plain = {**LATENT, "q_lora_rank": None}
    assert problems({"target_modules": ("linear_q_proj", "linear_kv_up_proj")}, **plain) == []
    (found,) = problems({"target_modules": ("linear_q_up_proj",)}, **plain)
    assert "expected some of all-linear, linear_q_proj, linear_kv_down_proj," in found


def test_routed_experts_are_not_the_linears_of_an_mlp() -> None:
    found = problems({"target_modules": ("linear_fc1", "linear_qkv")}, num_moe_experts=4)
    assert len(found) == 1
    assert "every layer has experts (model.num_moe_experts=4, model.moe_layer_freq=1)" in found[0]
    assert "name experts, some of linear_qkv, linear_proj, or all-linear" in found[0]


def test_shared_experts_are_linears_and_have_names_of_their_own() -> None:
    every = {"num_moe_experts": 4, "family": "deepseek_v2"}
    shared = {**every, "moe_shared_expert_intermediate_size": 40}
    names = ("shared_experts", "shared_experts_fc1", "shared_experts_fc1_up", "shared_experts_fc2")
    for name in (*names, "linear_fc1", "linear_fc1_up", "linear_fc2"):
        options = {"target_modules": (name,), "rank_pattern": {name: 2}, "export": True}
        assert problems(options, **shared) == []
    (found,) = problems({"target_modules": ("shared_experts_fc2",)}, **every)
    assert "names 'shared_experts_fc2', but no layer has shared experts (model.moe_shared" in found
    (found,) = problems({"target_modules": ("shared_experts",)})
    assert "moe_shared_expert_intermediate_size=None); expected some of all-linear, lin" in found
    ungated = {**shared, "gated_linear_unit": False}
    assert problems({"target_modules": ("shared_experts_fc1",)}, **ungated) == []
    (found,) = problems({"target_modules": ("shared_experts_fc1_up",)}, **ungated)
    assert "names 'shared_experts_fc1_up'" in found
    (found,) = problems(
        {"target_modules": ("shared_experts_fc2",), "rank_pattern": {"shared_experts_fc1": 2}},
        **shared,
    )
    assert "rank_pattern names 'shared_experts_fc1', which has no adapter" in found


def test_parts_that_a_family_does_not_name_are_not_exported() -> None:
    """Mixtral has no shared experts, but a plugin adds some."""
    shared = {"family": "mixtral", "num_moe_experts": 4, "moe_shared_expert_intermediate_size": 40}
    assert problems({}, **shared) == []
    assert problems({"target_modules": ("linear_q",), "export": True}, **shared) == []
    (found,) = problems({"target_modules": ("shared_experts_fc2",), "export": True}, **shared)
    assert "known for linear_q, linear_k, linear_v, linear_proj, linear_fc1_gate" in found
    assert "not for shared_experts_fc2 of mixtral; leave it out" in found
    (found,) = problems({"load": "x"}, gated_linear_unit=False)
    assert "not for linear_fc1 of llama" in found


def test_what_adapters_of_experts_lack_is_refused() -> None:
    mixtral = {"family": "mixtral", "num_moe_experts": 4}
    for targets in (("experts",), ("experts_fc1", "linear_q"), ("all-linear", "experts_fc2")):
        assert problems({"target_modules": targets}, **mixtral) == []
        assert (
            problems({"target_modules": targets, "rank_pattern": {targets[-1]: 2}}, **mixtral) == []
        )
    (found,) = problems({"target_modules": ("experts_fc2",)})
    assert "names 'experts_fc2', but no layer has experts (model.num_moe_experts=None)" in found
    (found,) = problems({"target_modules": ("experts",), "dropout": 0.1}, **mixtral)
    assert "plugins.lora.dropout=0.1: adapters of experts_fc1 and experts_fc2" in found
    assert "set it to 0, or leave the experts out" in found
    (found,) = problems({"target_modules": ("experts_fc1",), "dora": True}, **mixtral)
    assert "plugins.lora.dora=true: adapters of experts_fc1" in found
    (found,) = problems({"rank_pattern": {"experts": 2}}, **mixtral)
    assert "rank_pattern names 'experts', which has no adapter" in found


def test_a_stored_adapter_of_experts_is_matched_by_its_parameters(tmp_path: Path) -> None:
    mixtral = {"family": "mixtral", "num_moe_experts": 4}
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    both = write_header(
        tmp_path / "both",
        ("self_attn.q_proj", "mlp.experts", "mlp.experts.base_layer"),
        target_parameters=parameters,
        rank_pattern={"mlp.experts.down_proj": 2},
    )
    ours = {"target_modules": ("linear_q", "experts"), "rank_pattern": {"experts_fc2": 2}}
    assert problems({**ours, "load": both}, **mixtral) == []
    (found,) = problems({"target_modules": ("linear_q", "experts"), "load": both}, **mixtral)
    assert "set plugins.lora.rank=8 and plugins.lora.rank_pattern={experts_fc2 = 2}" in found
    one = write_header(tmp_path / "one", ("mlp.experts",), target_parameters=parameters[1:])
    assert problems({"target_modules": ("experts_fc2",), "load": one}, **mixtral) == []
    (found,) = problems({"target_modules": ("experts_fc1",), "load": one}, **mixtral)
    assert "set plugins.lora.target_modules=experts_fc2" in found
    (found,) = problems({"target_modules": ("linear_q",), "load": both}, **mixtral)
    assert "set plugins.lora.target_modules=linear_q,experts_fc1,experts_fc2" in found


@pytest.mark.parametrize(
    ("layers", "frequency", "named"), [(2, [1, 1], "[1, 1]"), (2, (1, 1), "[1, 1]"), (1, 2, "2")]
)
def test_a_pattern_of_expert_layers_alone_is_refused(
    layers: int, frequency: Any, named: str
) -> None:
    """No layer's MLP has a linear that the target could match."""
    (found,) = problems(
        {"target_modules": ("linear_fc2",)},
        num_layers=layers,
        num_moe_experts=4,
        moe_layer_freq=frequency,
    )
    assert "names 'linear_fc2', but every layer has experts" in found
    assert f"model.moe_layer_freq={named}" in found


def test_a_family_that_peft_names_are_not_known_of_is_not_exported() -> None:
    (found,) = problems({"export": True}, family="gpt2")
    assert "PEFT's names are known for llama, mixtral, mistral, qwen2, qwen3," in found
    assert "deepseek_v2, deepseek_v3, minicpm3, glm, glm4, phi3, not for gpt2; leave it" in found
    assert problems({}, family="gpt2") == []
    found = problems({"load": "x"}, family="gpt2")
    assert "not for gpt2" in found[0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"r": 4}, "plugins.lora.rank=8, but the adapter in"),
        ({"lora_alpha": 8}, "set plugins.lora.alpha=8"),
        ({"use_rslora": True}, "set plugins.lora.rslora=true"),
        ({"lora_bias": True}, "has lora_bias=True; only False is supported"),
        ({"bias": "all"}, "has bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save=lm_head, but adapter_model.safe"),
        (
            {"rank_pattern": {"q_proj": 2, ".*v_proj": 4}},
            "plugins.lora.rank=8 and plugins.lora.rank_pattern={}, but",
        ),
        (
            {"rank_pattern": {"q_proj": 2, ".*v_proj": 4}},
            "set plugins.lora.rank=8 and plugins.lora.rank_pattern={linear_q = 2, linear_v = 4}",
        ),
        ({"alpha_pattern": {"o_proj": 3.5}}, "plugins.lora.alpha_pattern={linear_proj = 3.5}"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern has 'q_proj': 0, expected a rank of"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern has '(', which is no regular expression"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern has 'q_proj': 'x', expected a number"),
        ({"alpha_pattern": [3]}, "alpha_pattern is [3], expected a table of modules"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights='pissa'"),
        ({"peft_type": "LOHA"}, "has peft_type='LOHA'"),
        ({"fan_in_fan_out": True}, "has fan_in_fan_out=True; only False is supported"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    (found,) = problems({"load": write_header(tmp_path, **config)})
    assert expected in found


@pytest.mark.parametrize(("experts", "gate"), [(None, "gate_proj"), (4, "mlp.gate_proj")])
def test_exported_targets_leave_out_experts(experts: int | None, gate: str) -> None:
    fields = {**LATENT, "num_moe_experts": experts}
    config = RunConfig(
        run=RunSection(output_dir="runs/x"), model=model_fields(fields), parallel=parallel_fields()
    )
    written = peft_config(config, LoraOptions(), ["linear_kv_up_proj", "linear_fc1_gate"])
    assert written["target_modules"] == sorted(["kv_b_proj", gate])


def test_patterns_that_match_a_stored_adapter_raise_no_problem(tmp_path: Path) -> None:
    folder = write_header(tmp_path, rank_pattern={"[qkv]_proj": 2}, alpha_pattern={"mlp.*": 3})
    options = {
        "load": folder,
        "rank_pattern": {"linear_qkv": 2},
        "alpha_pattern": {"linear_fc1": 3.0, "linear_fc2": 3.0},
    }
    assert problems(options) == []
    (found,) = problems({**options, "rank_pattern": {"linear_qkv": 2, "linear_v": 4}})
    wanted = "{linear_q = 2, linear_k = 2, linear_v = 2}"
    assert f"set plugins.lora.rank=8 and plugins.lora.rank_pattern={wanted}" in found


def test_a_stored_rank_by_layer_is_refused(tmp_path: Path) -> None:
    folder = write_header(tmp_path, num_layers=2, rank_pattern={"layers.1.self_attn.q_proj": 2})
    (found,) = problems({"load": folder}, num_layers=2)
    assert "has several ranks for a linear, by layer: {'linear_q': [2, 8]}" in found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rank_pattern": {"q_proj": 2}}, "as PEFT's q_proj is named here?); expected some of lin"),
        ({"alpha_pattern": {"all-linear": 2.0}}, "alpha_pattern names 'all-linear'; expected"),
        ({"rank_pattern": {"linear_q": 0}}, "rank_pattern has linear_q=0; expected a rank of at"),
        ({"alpha_pattern": {"linear_fc1": -1.0}}, "alpha_pattern has linear_fc1=-1.0; expected a"),
        (
            {"target_modules": ("linear_q",), "rank_pattern": {"linear_qkv": 2, "linear_v": 2}},
            "rank_pattern names 'linear_v', which has no adapter; add it to plugins.lora.target",
        ),
    ],
)
def test_a_pattern_of_what_has_no_adapter_is_refused(
    options: dict[str, Any], expected: str
) -> None:
    (found,) = problems(options)
    assert expected in found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rank": 4}, "plugins.lora.rank=4, but the checkpoint's adapters have 8"),
        ({"rank_pattern": {"linear_q": 2}}, "rank_pattern={'linear_q': 2}, but the checkpoint's"),
        ({"alpha_pattern": {"linear_q": 2.0}}, "alpha_pattern={'linear_q': 2.0}, but the check"),
    ],
)
def test_a_resumed_run_has_the_ranks_and_alphas_of_its_adapters(
    options: dict[str, Any], expected: str
) -> None:
    config = RunConfig(
        run=RunSection(output_dir="runs/x"), model=model_fields(), parallel=parallel_fields()
    )
    stored = BaseRecord(config, LoraOptions()).state_dict()
    BaseRecord(config, LoraOptions()).load_state_dict(stored)
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        BaseRecord(config, LoraOptions(**options)).load_state_dict(stored)


def test_settings_that_are_null_change_nothing(tmp_path: Path) -> None:
    keys = ("use_dora", "modules_to_save", "init_lora_weights", "fan_in_fan_out")
    assert problems({"load": write_header(tmp_path, **dict.fromkeys(keys))}) == []


def test_an_adapter_of_other_parts_says_which_to_target(tmp_path: Path) -> None:
    folder = write_header(tmp_path, ("self_attn.q_proj", "self_attn.v_proj"))
    (found,) = problems({"load": folder})
    assert "set plugins.lora.target_modules=linear_q,linear_v" in found
    assert problems({"load": folder, "target_modules": ("linear_q", "linear_v")}) == []
    dense = write_header(tmp_path / "dense", ("mlp.gate_proj", "mlp.shared_experts.up_proj"))
    shared = {**LATENT, "num_moe_experts": 4, "moe_shared_expert_intermediate_size": 40}
    (found,) = problems({"load": dense}, num_layers=2, moe_layer_freq=[0, 1], **shared)
    assert "linear_fc1_gate, shared_experts_fc1_up of dense layers without shared_exper" in found
    foreign = write_header(tmp_path / "foreign", (*MODULES, "mlp.gate"))
    assert "holds tensors that this model does not have" in problems({"load": foreign})[0]


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "there is no folder" in problems({"load": str(tmp_path / "none")})[0]
    assert "has no adapter_model.safetensors" in problems({"load": str(tmp_path)})[0]
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert "is a pickle" in problems({"load": str(tmp_path)})[0]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 8)
    assert "cannot be read" in problems({"load": str(tmp_path)})[0]


@pytest.mark.parametrize("options", [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}])
def test_options_have_bounds(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        LoraOptions(**options)


def test_an_adapter_that_its_own_run_would_overwrite_is_refused(tmp_path: Path) -> None:
    load = write_header(tmp_path / "run" / "adapter")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for output_dir in (tmp_path / "run", tmp_path / "link"):
        (found,) = problems({"load": load}, output_dir=str(output_dir))
        assert "plugins.lora.export" in found
        assert f"would overwrite plugins.lora.load ({load}/adapter_model.safetensors)" in found
        assert problems({"load": load, "export": False}, output_dir=str(output_dir)) == []
    assert problems({"load": load}, output_dir=str(tmp_path / "other")) == []


def test_an_adapter_of_other_weights_is_refused(tmp_path: Path) -> None:
    """Of the same shapes; where its file has no digest of them, as PEFT's, see below."""
    bases = [tmp_path / name for name in ("right", "other")]
    for base in bases:
        base.mkdir()
        (base / "config.json").write_text("{}")
        (base / "model.safetensors").write_text(base.name)
    named = write_header(tmp_path / "named", metadata=metadata_of(weights_digest(bases[0])))
    unnamed = write_header(tmp_path / "unnamed")
    for folder, base, count in ((named, 0, 0), (named, 1, 1), (unnamed, 1, 0)):
        found = problems({"load": folder}, hf_path=str(bases[base]))
        assert len(found) == count, found
        for problem in found:
            assert f"lora: plugins.lora.load={named}: the adapter was trained beside" in problem
            assert f"than those in {bases[1]}; name their folder" in problem


def test_an_adapter_that_names_a_folder_of_other_weights_is_refused(tmp_path: Path) -> None:
    """A file of PEFT's names its base: a folder that is here, or what cannot be compared."""
    names = ("base", "other", "copy", "empty")
    base, other, copy, empty = folders = [tmp_path / name for name in names]
    for folder, content in zip(folders, ("weights", "others", "weights", ""), strict=True):
        folder.mkdir()
        if content:
            (folder / "model.safetensors").write_text(content)
    link = tmp_path / "link"
    link.symlink_to(base)
    for named in (base, copy, link, empty, tmp_path / "nowhere", "meta-llama/Llama-2-7b", "", None):
        wanted = None if named is None else str(named)
        load = write_header(tmp_path / "adapter", base_model_name_or_path=wanted)
        assert problems({"load": load}, hf_path=str(base)) == [], named
    load = write_header(tmp_path / "adapter", base_model_name_or_path=str(other))
    (found,) = problems({"load": load}, hf_path=str(base))
    assert found == (
        f"lora: plugins.lora.load={load}: the adapter names {other} as its base, whose weights "
        f"differ from those in {base}; name that folder, or, if these are the same in another "
        f"form, set base_model_name_or_path in the adapter's adapter_config.json to {base}"
    )
    # A digest tells more than a name.
    digest = metadata_of(weights_digest(base))
    write_header(tmp_path / "adapter", metadata=digest, base_model_name_or_path=str(other))
    assert problems({"load": load}, hf_path=str(base)) == []
