"""MXFP4 against transformers' own conversion, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ascend_run.ops.experts.mxfp4 import PackedMatrices, with_packed

EXPERTS, OUTPUTS, BLOCKS = 3, 10, 4


@pytest.fixture
def packed(tmp_path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (EXPERTS, OUTPUTS, BLOCKS, 16), generator=generator)
    scales = torch.randint(90, 160, (EXPERTS, OUTPUTS, BLOCKS), generator=generator)
    found = {"w_blocks": blocks.byte(), "w_scales": scales.byte(), "w_bias": torch.ones(3)}
    save_file(found, tmp_path / "model.safetensors")
    return found


def test_any_part_of_a_packed_matrix_is_that_of_transformers(
    packed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    wanted = convert_moe_packed_tensors(packed["w_blocks"], packed["w_scales"])
    assert len(wanted.unique()) > 100
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        slices = with_packed({name: file.get_slice(name) for name in packed})
        assert slices.keys() == {"w", "w_bias"}
        whole = slices["w"]
        assert isinstance(whole, PackedMatrices)
        assert whole.get_shape() == [*wanted.shape] == [EXPERTS, BLOCKS * 32, OUTPUTS]
        for expert in range(EXPERTS):
            for inputs in (slice(None), slice(0, 5), slice(31, 33), slice(70, 128), slice(64, 96)):
                for outputs in (slice(0, OUTPUTS), slice(3, 7)):
                    got = whole[expert, inputs, outputs]
                    assert got.dtype is torch.bfloat16
                    assert torch.equal(got, wanted[expert, inputs, outputs])


@pytest.mark.parametrize("name", ["w_blocks", "w_scales"])
def test_other_tensors_of_such_names_stay_as_they_are(
    packed: dict[str, torch.Tensor], name: str, tmp_path: Path
) -> None:
    packed[name] = packed[name].float()
    save_file(packed, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in packed}
        assert with_packed(slices) == slices
        del slices["w_scales"]
        assert with_packed(slices) == slices
