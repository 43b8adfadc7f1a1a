from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest

from ascend_run.core.config import megatron_fields as module
from ascend_run.core.config.megatron_fields import find_megatron, megatron_fields
from ascend_run.plugin_api import ConfigError


def test_public_fields_and_plain_defaults_match_megatrons_dataclass() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own, if it is first imported here
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.transformer.transformer_config import (
            MLATransformerConfig,
            TransformerConfig,
        )
    inherited = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    fields = {field.name: field for field in dataclasses.fields(MLATransformerConfig)}
    fields |= {field.name: field for field in dataclasses.fields(TransformerConfig)}
    not_read = {"rotary_base", "rotary_percent", *(n for n in fields if n.startswith("_"))}
    ours = megatron_fields()
    assert ours.keys() == fields.keys() - not_read
    for name, read in ours.items():
        field: Any = fields[name]
        is_plain = field.default is not dataclasses.MISSING
        assert (read.section == "parallel") == (name in inherited), name
        if read.type is not None:
            default = field.default if is_plain else field.default_factory()
            assert repr(read.default) == repr(default), name


def test_reading_the_fields_imports_neither_torch_nor_megatron() -> None:
    script = (
        "import sys; from ascend_run.core.config.megatron_fields import megatron_fields; "
        "import ascend_run.core.config.layout, ascend_run.prepare.config.printing; "
        "megatron_fields(); print([m for m in ('torch', 'megatron') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("num_layers", int),
        ("num_moe_experts", int | None),
        ("moe_layer_freq", int | list[int]),
        ("window_size", typing.Optional[tuple[int, int]]),  # noqa: UP045
        ("normalization", typing.Literal["LayerNorm", "RMSNorm"]),
        ("pipeline_model_parallel_layout", str | list[typing.Any] | None),
        ("activation_func", None),
        ("params_dtype", None),
        ("attention_backend", None),
        ("kv_lora_rank", int),
        ("q_lora_rank", int | None),
        ("timers", None),
    ],
)
def test_an_annotation_keeps_what_a_file_can_hold(name: str, expected: object) -> None:
    assert megatron_fields()[name].type == expected


def test_a_field_has_its_documentation_on_one_line() -> None:
    assert megatron_fields()["num_layers"].doc == (
        "Number of transformer layers in a transformer block."
    )
    assert "\n" not in megatron_fields()["sequence_parallel"].doc


def test_a_missing_megatron_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="megatron-core is not installed"):
        find_megatron()


def test_a_megatron_of_another_shape_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model_parallel_config.py"
    file.write_text("class Something: ...\n")
    with pytest.raises(ConfigError, match="has no class ModelParallelConfig"):
        module._class_fields(file, "ModelParallelConfig", "parallel")
    file.write_text("class (\n")
    with pytest.raises(ConfigError, match="cannot read Megatron's fields"):
        module._class_fields(file, "ModelParallelConfig", "parallel")
