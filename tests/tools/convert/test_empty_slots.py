"""Runs with empty layer slots: the converted model has the layers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ascend_run.tools.convert.empty_slots import values_without
from tests.support.family_checks import stored
from tests.support.tiny_configs import model_fields

from .megatron_files import hugging_face
from .test_command import convert, refused
from .test_mp_rank import check_equal
from .test_plugin_biases import change, enable


@pytest.mark.needs_plugins("noop-layers")
def test_a_run_with_empty_slots_returns_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    hugging_face(theirs)
    assert convert("--to", "ascend-run", theirs, run) == 0
    change(run, "\nnum_layers = 4", "\nnum_layers = 6")
    assert "parameter decoder.layers.4.input_layernorm.weight is missing" in refused(
        capsys, "--to", "hf", run, tmp_path / "out"
    )
    enable(run, "noop-layers", layers=[0, 3])
    for target in ("hf", "mp-rank"):
        assert convert("--to", target, "--verify", "tensors", run, tmp_path / target) == 0
    assert convert("--to", "hf", tmp_path / "mp-rank", tmp_path / "back") == 0
    for folder in ("hf", "back"):
        check_equal(stored(tmp_path / folder), stored(theirs))


SPARSE = {"num_moe_experts": 4}
WINDOW = {"window_size": (3, 0)}


@pytest.mark.parametrize(
    ("fields", "empty", "expected"),
    [
        ({}, [0, 4], {"num_layers": 3}),
        ({**SPARSE, "moe_layer_freq": 2}, [0, 3], {"moe_layer_freq": [0, 1, 1]}),
        ({**SPARSE, "moe_layer_freq": (0, 1, 1, 0, 1)}, [0, 3], {"moe_layer_freq": 1}),
        ({**WINDOW, "window_attn_skip_freq": 2}, [1], {"window_attn_skip_freq": [1, 1, 0, 1]}),
        (
            {**WINDOW, "window_attn_skip_freq": (1, 0, 0, 1, 1)},
            [0, 2],
            {"window_attn_skip_freq": [0, 1, 1]},
        ),
        ({"window_attn_skip_freq": 2}, [1], {"num_layers": 4}),
    ],
)
def test_what_counts_slots_counts_layers(
    fields: Mapping[str, object], empty: list[int], expected: Mapping[str, object]
) -> None:
    found = values_without(model_fields({"num_layers": 5, **fields}), empty)
    assert found == {
        "model.num_layers": 5 - len(empty),
        **{f"model.{name}": value for name, value in expected.items()},
    }
