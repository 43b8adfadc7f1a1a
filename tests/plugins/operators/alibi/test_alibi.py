"""Slopes against transformers', the bias against its formula, and every layout against one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from ascend_run.ops.attention.alibi import slopes
from ascend_run.plugin_api import AscendRunError, AttentionSpec, PositionBias
from ascend_run.plugins.operators.alibi import Alibi
from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.testing.parity import Case, Parity
from tests.support.needed_plugins import case
from tests.support.probed_runs import built, prepare

ON = {"model.position_embedding_type": "none"}


@settings(deadline=None)
@given(st.integers(1, 96))
def test_slopes_are_blooms(heads: int) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    # Of the key at position 1, for any query: the bias is equal up to a constant per row.
    assert theirs[:, 0, 1].tolist() == pytest.approx(slopes(heads), rel=1e-6)


@pytest.mark.parametrize("heads", [1, 2, 8, 32])
@pytest.mark.parametrize("max_bias", [8.0, 6.0])
def test_slopes_of_powers_of_two_are_mpts(heads: int, max_bias: float) -> None:
    theirs = build_mpt_alibi_tensor(heads, 2, alibi_bias_max=max_bias)
    assert (-theirs[:, 0, 0]).tolist() == pytest.approx(slopes(heads, max_bias), rel=1e-6)


def test_a_bias_of_keys_alone_is_the_same_attention() -> None:
    """Hugging Face's variant: slope times position of the key, under a causal mask."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 1, 4, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    theirs = torch.tensor(slopes(4)).double()[:, None, None] * torch.arange(9)
    kernel = FusedCpuAttention()
    bias = PositionBias(slopes=torch.tensor(slopes(4), dtype=torch.float64))
    ours = kernel.forward(q, k, v, AttentionSpec(scale=0.3, position_bias=bias)).out
    assert torch.allclose(
        ours, kernel.forward(q, k, v, AttentionSpec(scale=0.3, bias=theirs)).out, atol=1e-12
    )


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.numel())
        return result


def test_no_rank_materializes_the_matrix() -> None:
    length, heads = 2048, 2
    q = torch.randn(length, 1, heads, 4)
    bias = PositionBias(slopes=torch.tensor(slopes(heads)))
    spec = AttentionSpec(scale=0.5, position_bias=bias)
    kernel = FusedCpuAttention()
    with torch.no_grad(), _Largest() as largest:
        out, lse, saved = kernel.forward(q, q, q, spec)
        kernel.backward(out, q, q, q, out, lse, saved, spec)
    assert largest.entries <= heads * 256 * length


@pytest.mark.parametrize("distance", ["linear", "root"])
def test_every_layer_is_given_the_slopes_of_its_heads(tmp_path: Path, distance: str) -> None:
    values = {**ON, "enable": ["alibi"], "plugins.alibi.distance": distance}
    with built(tmp_path, values=values) as (_, context):
        layers = context.models["policy"].chunks[0].module.decoder.layers
        found = [layer.self_attention.core_attention.position_bias for layer in layers]
    assert all(bias is found[0] for bias in found)
    assert found[0].slopes.tolist() == slopes(8)
    assert found[0].root == (distance == "root")


LAYOUTS = [
    case((), {"tp": 2}),
    case((), {"pp": 2}),
    case(("ulysses",), {"cp": 2}),
    case(("ulysses",), {"cp": 2, "tp": 2}),
    case(("ring-attention",), {"cp": 2}),
    case(("ring-attention",), {"cp": 4}),
    case(("swap-attention",), {}),
]


@pytest.mark.exhaustive(by=lambda beside: [bool(beside)])
@pytest.mark.parametrize(("beside", "layout"), LAYOUTS, ids=str)
def test_every_layout_computes_what_one_rank_does(
    parity: Parity, beside: tuple[str, ...], layout: dict[str, int]
) -> None:
    names = ("alibi", *beside)
    parity(names, layout=layout, config=ON, options={"plugins.swap-attention.min_bytes": 1})


def test_positions_count_and_so_does_the_kind_of_distance(parity: Parity) -> None:
    plain = parity.outcomes(Case(plugins=(), config=ON))
    linear = parity.outcomes(Case(plugins=("alibi",), config=ON))
    options = {"plugins.alibi.distance": "root"}
    root = parity.outcomes(Case(plugins=("alibi",), config=ON, options=options))
    losses = {outcomes[0].losses[0] for outcomes in (plain, linear, root)}
    assert len(losses) == 3
    assert min(abs(a - b) for a in losses for b in losses if a != b) > 1e-4


def test_it_needs_positions_to_be_left_to_it(tmp_path: Path) -> None:
    with pytest.raises(AscendRunError, match=r"set model\.position_embedding_type=none"):
        prepare(tmp_path, {"enable": ["alibi"]})


def test_slopes_halve_from_head_to_head_where_there_are_8() -> None:
    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    assert math.isclose(slopes(16)[0], 2**-0.5)
    assert Alibi.manifest.attention_needs.position_bias
