"""The plugin: its declarations, errors and results; tests/ops tests its kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ascend_run.ops.experts.loop_experts import loop_experts
from ascend_run.plugin_api import Claim, Numerics, RunConfig
from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.experts.gmm import BACKENDS, Gmm, GmmConfig
from ascend_run.plugins.experts.gmm.kernel import GroupedExperts
from ascend_run.plugins.platforms.cpu.operators import (
    platform_ops,
    with_onednn_matmuls,
    with_wide_matmuls,
)
from ascend_run.testing.effects import count_operations
from ascend_run.types.config import TrainSection
from ascend_run.types.layout import Layout
from tests.support.tiny_configs import model_fields, parallel_fields

COUNTS = [6, 0, 3, 7]
SWIGLU = c.ExpertActivation(function=F.silu)


def config(
    *,
    experts: int | None = 4,
    hidden_size: int = 8,
    moe_ffn_hidden_size: int = 16,
    precision: str = "bf16",
) -> RunConfig:
    model = {
        "num_moe_experts": experts,
        "hidden_size": hidden_size,
        "moe_ffn_hidden_size": moe_ffn_hidden_size,
        "ffn_hidden_size": None,
    }
    return RunConfig(
        model=model_fields(model),
        parallel=parallel_fields(),
        train=TrainSection(precision=precision),
    )


def kernel(backend: str = "auto", device: str = "cpu") -> GroupedExperts:
    answer = asked(Gmm(GmmConfig(backend=backend)), config(), device)
    assert isinstance(answer, GroupedExperts)
    return answer


def asked(
    plugin: Gmm, run: RunConfig, device: str = "cpu", ops: c.PlatformOps | None = None
) -> c.ExpertsKernel | None:
    where: Any = SimpleNamespace(torch_device=torch.device(device))
    return plugin.ascend_experts(config=run, device=where, ops=ops or platform_ops())


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return [tokens, probs, fc1, fc2] and the gradient of the output; widths 8 and 16."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    total, experts = sum(COUNTS), len(COUNTS)
    leaves = [draw(total, 8), draw(total), draw(experts, 32, 8), draw(experts, 8, 16)]
    return [leaf.requires_grad_() for leaf in leaves], draw(total, 8)


def test_it_claims_the_experts_and_changes_rounding_only() -> None:
    assert claims_of(Gmm) == (Claim.EXPERTS,)
    assert Gmm.manifest.numerics is Numerics.ROUNDING


def test_it_is_idle_exactly_where_there_are_no_experts() -> None:
    assert Gmm.manifest.idle is not None
    for experts in (None, 0, 4):
        run = config(experts=experts)
        answer = asked(Gmm(GmmConfig()), run)
        assert Gmm.manifest.idle.holds(run) == (answer is None) == (not experts)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend"):
        GmmConfig(backend="cublas")


def test_widths_that_torch_cannot_group_are_rejected_with_valid_ones() -> None:
    run = config(hidden_size=12, moe_ffn_hidden_size=20)
    native = Gmm(GmmConfig(backend="grouped_mm"))
    problems = native.ascend_check(config=run, layout=Layout())
    assert len(problems) == 2
    assert "model.hidden_size=12 to be a multiple of 8 in bf16; use 16" in problems[0]
    assert Gmm(GmmConfig()).ascend_check(config=run, layout=Layout()) == []
    wide_enough = config(hidden_size=12, moe_ffn_hidden_size=20, precision="fp32")
    assert native.ascend_check(config=wide_enough, layout=Layout()) == []


def test_the_width_is_that_of_an_expert_tensor_parallel_rank() -> None:
    run = config(hidden_size=16, moe_ffn_hidden_size=24)
    native = Gmm(GmmConfig(backend="grouped_mm"))
    assert native.ascend_check(config=run, layout=Layout()) == []
    (problem,) = native.ascend_check(config=run, layout=Layout(world_size=2, tp=2, expt_tp=2))
    assert "model.moe_ffn_hidden_size=24 to be a multiple of 16 in bf16; use 32" in problem


@pytest.mark.parametrize(
    ("backend", "products"),
    [
        ("grouped_mm", {"_grouped_mm": 6}),
        ("bmm", {"bmm": 6}),
        ("loop", {"mm": 6 * len(COUNTS)}),
        ("auto", {"_grouped_mm": 6}),
    ],
)
def test_the_named_backend_takes_two_products_forward_and_four_backward(
    backend: str, products: dict[str, int]
) -> None:
    (tokens, probs, fc1, fc2), dy = inputs(torch.bfloat16)
    experts = kernel(backend)
    with count_operations() as seen:
        out = experts(tokens, COUNTS, probs, c.ExpertWeights(fc1, fc2), SWIGLU)
        out.backward(dy)
    assert {name: n for name, n in seen.items() if name.endswith("mm")} == products


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_loop_is_the_plain_loop_bit_for_bit(dtype: torch.dtype) -> None:
    (tokens, probs, fc1, fc2), dy = inputs(dtype)
    out = kernel("loop")(tokens, COUNTS, probs, c.ExpertWeights(fc1, fc2), SWIGLU)
    gradients = torch.autograd.grad(out, (tokens, probs, fc1, fc2), dy)
    parts = zip(
        tokens.split(COUNTS), probs.split(COUNTS), fc1.unbind(0), fc2.unbind(0), strict=True
    )
    rows = []
    for x, prob, first, second in parts:
        gate, up = (x @ first.t()).chunk(2, dim=-1)
        rows.append((F.silu(gate) * up * prob[:, None]) @ second.t())
    plain = torch.cat(rows)
    expected = torch.autograd.grad(plain, (tokens, probs, fc1, fc2), dy)
    assert torch.equal(out, plain)
    for result, right in zip(gradients, expected, strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_biases_and_a_clamp_are_the_built_in_loop_bit_for_bit(
    dtype: torch.dtype, clamp: float | None
) -> None:
    leaves, dy = inputs(dtype)
    biases = [torch.randn_like(x[:, :, 0]).detach().requires_grad_() for x in leaves[2:]]
    activation = c.ExpertActivation(function=F.gelu, is_silu=False, clamp=clamp, offset=1.0)
    tokens, probs, *weights = *leaves, *biases
    results = []
    for compute in (kernel("loop"), loop_experts):
        out = compute(tokens, COUNTS, probs, c.ExpertWeights(*weights), activation)
        results.append([out, *torch.autograd.grad(out, (tokens, probs, *weights), dy)])
    assert all(torch.equal(result, right) for result, right in zip(*results, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_value_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    (tokens, probs, fc1, fc2), dy = inputs(torch.bfloat16)
    experts = kernel(backend)
    counts: Any = torch.tensor(COUNTS) if experts.counts_on_device else tuple(COUNTS)
    with count_operations() as seen:
        out = experts(tokens, counts, probs, c.ExpertWeights(fc1, fc2), SWIGLU)
        out.backward(dy)
    assert experts.counts_on_device is (backend == "grouped_mm")
    assert seen["_grouped_mm"] == (6 if backend in ("grouped_mm", "auto") else 0)
    assert seen["_local_scalar_dense"] == 0


def test_counts_stay_on_the_device_where_the_backend_takes_them_there() -> None:
    assert kernel("auto", "cuda").counts_on_device
    assert not kernel("loop", "cuda").counts_on_device
    assert not kernel("bmm", "cuda").counts_on_device
    for changed in (with_wide_matmuls, with_onednn_matmuls):
        host = asked(Gmm(GmmConfig()), config(), ops=changed(platform_ops()))
        assert isinstance(host, GroupedExperts)
        assert not host.counts_on_device
