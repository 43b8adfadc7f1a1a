"""The plugin's errors, and what it leaves unchanged."""

from __future__ import annotations

import pytest
import torch

from ascend_run.ops.elementwise.rotary import rotary, split_qkv_rotary
from ascend_run.plugin_api import AscendRunError
from ascend_run.prepare.prepare import prepare

BASE = ["model.family=llama", "data.train=x", "model.num_layers=2", "model.hidden_size=32",
        "model.num_attention_heads=4", "model.ffn_hidden_size=48", "model.vocab_size=64",
        "data.seq_length=16"]  # fmt: skip


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("plugins.compile.fullgraph=true", "plugins.compile.regions=parts"),
        ("plugins.compile.mode=reduce-overhead", "max-autotune-no-cudagraphs"),
        ("plugins.compile.mode=max-autotune", "CUDA graphs"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(option: str, told: str) -> None:
    with pytest.raises(AscendRunError, match="compile") as refusal:
        prepare(None, [*BASE, option], enable=["compile"])
    assert told in str(refusal.value)


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(AscendRunError, match=r"no-such-compiler.*install one, set CXX"):
        prepare(None, BASE, enable=["compile"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 4])
def test_rotation_in_a_graph_is_the_rotation_outside(interleaved: bool, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 3 * 4 * 8, generator=generator, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(6, width // 2, generator=generator, dtype=torch.float64)
    repeat = torch.repeat_interleave if interleaved else lambda t, n, dim: torch.cat([t] * n, dim)
    angles = repeat(angles, 2, dim=-1)
    tables = angles.cos(), angles.sin()

    def both(mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = rotary(mixed.unflatten(2, (12, 8)), *tables, interleaved)
        return whole, *split_qkv_rotary(mixed, *tables, (3, 2, 8), interleaved)

    graph = torch.compile(both, backend="aot_eager", fullgraph=True)
    for got, want in zip(graph(x), both(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
        assert got.stride() == want.stride()
        upstream = torch.randn(got.shape, generator=generator, dtype=torch.float64)
        pair = [torch.autograd.grad(y, x, upstream, retain_graph=True)[0] for y in (got, want)]
        torch.testing.assert_close(*pair, rtol=0, atol=1e-13)
