"""Merging an adapter into a model's files, against PEFT's merge."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.support.tiny_llama import write_llama

from .merged_models import merge
from .peft_models import peft_model, write_mixtral, write_peft


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"up_proj": 9}}],
    ids=["one scale", "scales by module"],
)
def test_the_merged_model_is_pefts(tmp_path: Path, options: dict[str, Any]) -> None:
    base = write_llama(tmp_path / "base", 61)
    model = peft_model(base, **options)
    adapter = write_peft(model, tmp_path / "adapter")
    code, output = merge(base, adapter, tmp_path / "merged")
    assert code == 0, output
    assert "14 weights changed" in output
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model.merge_and_unload().state_dict()
    ours = LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    before = load_file(tmp_path / "base/model.safetensors")
    assert ours.keys() == expected.keys()
    changed = [name for name, tensor in ours.items() if not torch.equal(tensor, before[name])]
    assert len(changed) == 14
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)


def test_an_unmergeable_adapter_is_reported(tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base", 61)
    adapter = write_peft(peft_model(base), tmp_path / "adapter")
    small = write_llama(tmp_path / "small", 61, num_hidden_layers=1)
    code, output = merge(small, adapter, tmp_path / "merged")
    assert code == 2
    assert "model.layers.1.mlp.down_proj.weight is not in the model" in output
    narrow = write_llama(tmp_path / "narrow", 61, intermediate_size=40)
    code, output = merge(narrow, adapter, tmp_path / "merged")
    assert code == 2
    assert "the adapter is for a weight of" in output
    assert not (tmp_path / "merged").exists()
    code, output = merge(base, adapter, tmp_path / "adapter")
    assert code == 2
    assert "is not empty" in output
    code, output = merge(base, adapter, tmp_path / "base/merged")
    assert code == 2
    assert "is inside BASE" in output
    code, output = merge(base, str(tmp_path / "none"), tmp_path / "merged")
    assert code == 2
    assert "there is no folder" in output


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (8, "but the adapter's config has rank 8"),
        (0, "r is 0, expected a rank of at least 1"),
        (4.0, "r is 4.0, expected a rank"),
        (True, "r is True, expected a rank"),
    ],
)
def test_a_config_of_another_rank_is_refused(tmp_path: Path, rank: float, expected: str) -> None:
    """The matrices have rank 4: a wrong one would change the scale."""
    base = write_llama(tmp_path / "base", 61)
    adapter = write_peft(peft_model(base), tmp_path / "adapter")
    file = Path(adapter, "adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "r": rank}))
    code, output = merge(base, adapter, tmp_path / "merged")
    assert (code, expected in output) == (2, True), output
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("count", [2, 6])
def test_experts_of_another_count_are_refused(tmp_path: Path, count: int) -> None:
    base = write_mixtral(tmp_path / "base")
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    model = peft_model(base, targets=(), target_parameters=names)
    adapter = write_peft(model, tmp_path / "adapter")
    other = write_mixtral(tmp_path / "other", num_local_experts=count)
    code, output = merge(other, adapter, tmp_path / "merged")
    assert code == 2, output
    assert "so for 4 experts" in output
    assert f"the model has {count} with" in output
    assert not (tmp_path / "merged").exists()
    assert merge(base, adapter, tmp_path / "merged")[0] == 0


def test_a_folder_that_is_not_there_is_named_as_the_argument(tmp_path: Path) -> None:
    code, output = merge(write_llama(tmp_path / "base"), str(tmp_path / "none"), tmp_path / "out")
    assert code == 2
    assert f"ADAPTER: there is no folder {tmp_path / 'none'}" in output.replace("\n", "")
