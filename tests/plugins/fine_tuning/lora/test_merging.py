"""``convert --adapter`` on Hugging Face folders: what it refuses, and the files that go along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ascend_run.ops.linear.peft_base import metadata_of
from tests.support.tiny_llama import write_llama

from .merged_models import convert
from .peft_models import peft_model, write_mixtral, write_peft

BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def merged(base: str | Path, adapter: str | Path, target: Path) -> int:
    return convert("--to", "hf", "--adapter", adapter, base, target)


def test_an_unmergeable_adapter_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_llama(tmp_path / "base", 61)
    adapter = write_peft(peft_model(base), tmp_path / "adapter")
    small = write_llama(tmp_path / "small", 61, num_hidden_layers=1)
    narrow = write_llama(tmp_path / "narrow", 61, intermediate_size=40)
    for of, target, message in (
        (small, "merged", "model.layers.1.mlp.down_proj.weight is not in the model"),
        (narrow, "merged", "model.layers.0.mlp.down_proj.lora_A is [4, 48], expected [4, 40]"),
        (base, "adapter", "is not empty"),
        (base, "base/merged", "is inside"),
    ):
        assert merged(of, adapter, tmp_path / target) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (8, "lora_A is [4, 32], expected [8, 32]"),
        (0, "r is 0, expected a rank of at least 1"),
        (4.0, "r is 4.0, expected a rank"),
        (True, "r is True, expected a rank"),
    ],
)
def test_a_config_of_another_rank_is_refused(
    tmp_path: Path, rank: float, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The matrices have rank 4: a wrong one would change the scale."""
    base = write_llama(tmp_path / "base", 61)
    adapter = write_peft(peft_model(base), tmp_path / "adapter")
    file = Path(adapter, "adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "r": rank}))
    assert merged(base, adapter, tmp_path / "merged") == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("count", [2, 6])
def test_experts_of_another_count_are_refused(
    tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_mixtral(tmp_path / "base")
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    model = peft_model(base, targets=(), target_parameters=names)
    adapter = write_peft(model, tmp_path / "adapter")
    other = write_mixtral(tmp_path / "other", num_local_experts=count)
    assert merged(other, adapter, tmp_path / "merged") == 2
    assert f"lora_A and lora_B are [16, 48] and [32, 16], expected [{4 * count}, 48]" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "merged").exists()
    assert merged(base, adapter, tmp_path / "merged") == 0


def test_another_base_of_the_same_shapes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the adapter's file tells which weights it was trained beside; PEFT's own does not."""
    base, other = (write_llama(tmp_path / f"{seed}", 61, seed=seed) for seed in (1, 2))
    adapter = write_peft(peft_model(base), tmp_path / "adapter")
    assert merged(other, adapter, tmp_path / "of any") == 0
    file = Path(adapter, "adapter_model.safetensors")
    save_file(load_file(file), file, metadata=metadata_of(base))
    assert merged(other, adapter, tmp_path / "of another") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"trained beside other weights ({base}) than those in {other}" in message
    assert not (tmp_path / "of another").exists()
    assert merged(base, adapter, tmp_path / "merged") == 0


def test_a_base_that_is_not_there_is_not_named(tmp_path: Path) -> None:
    assert metadata_of(None) == metadata_of(tmp_path / "none") == {"format": "pt"}


def test_tokenizer_and_settings_of_generation_go_along(tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base", 61)
    for name in (*BESIDE, "README.md"):
        Path(base, name).write_text(f"{{}} {name}")
    adapter = write_peft(peft_model(base), tmp_path / "adapter")
    assert merged(base, adapter, tmp_path / "merged") == 0
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {
        *BESIDE,
        "config.json",
        "model.safetensors",
    }
    for name in BESIDE:
        assert (tmp_path / "merged" / name).read_text() == f"{{}} {name}"
    with safe_open(tmp_path / "merged/model.safetensors", framework="pt") as stored:
        assert stored.metadata() == {"format": "pt"}
