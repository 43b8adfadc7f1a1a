"""CUDA's operators, on the CPU: the torch implementation, compiled in one graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ascend_run.ops.attention.ring_update import ring_attention_update
from ascend_run.ops.elementwise.dropout_add_norm import dropout_add_layer_norm, dropout_add_rms_norm
from ascend_run.ops.elementwise.ema_adamw import ema_adamw_step_
from ascend_run.plugins.platforms.cuda import host_mapped
from ascend_run.plugins.platforms.cuda.compiled import compiled
from ascend_run.plugins.platforms.cuda.forms import COMPILED, described, fused


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def results(form: Callable[..., Any], leaves: list[Tensor], mask: Tensor) -> list[Tensor]:
    x, residual, weight, bias, rowscale, layerscale = leaves
    result = form(
        x, residual, weight, bias, 0.5, 1e-5, rowscale=rowscale, layerscale_H=layerscale, mask=mask
    )
    total = (result.out * draw(5, 3, 8, seed=8)).sum() + result.summed.sin().sum()
    return [result.out, result.summed, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("norm", [dropout_add_layer_norm, dropout_add_rms_norm])
def test_dropout_and_norm_are_one_graph_with_the_same_gradients(norm: Callable[..., Any]) -> None:
    shapes = ((5, 3, 8), (5, 3, 8), (8,), (8,), (5, 3), (8,))
    leaves = [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    mask = draw(5, 3, 8, seed=9).detach() > 0
    got = results(compiled(norm, backend="aot_eager"), leaves, mask)
    torch.testing.assert_close(got, results(norm, leaves, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor's own
def test_a_ring_update_is_compiled_code() -> None:
    outs = [draw(6, 2, 12, seed=seed).detach() for seed in (0, 1)]
    statistics = [draw(2, 3, 6, 1, seed=seed).detach().repeat(1, 1, 1, 8) for seed in (2, 3)]
    statistics[0][:, :, 1] = -torch.inf
    triples = [t for o, s in zip(outs, statistics, strict=True) for t in (o, s, s.exp())]
    got = fused()["ring_attention_update"](*triples)
    torch.testing.assert_close(got, ring_attention_update(*triples), rtol=1e-12, atol=1e-12)


def test_the_step_is_torchs_fused_one() -> None:
    def run(step_: Callable[..., None]) -> list[Tensor]:
        p, g = draw(7, seed=0).detach(), draw(7, seed=1).detach()
        state = [torch.zeros_like(p), torch.zeros_like(p), p.clone()]
        options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
        step_([p], [g], *([s] for s in state), step=1, ema_decay=0.9, **options)
        return [p, *state]

    forms = fused()
    torch.testing.assert_close(run(forms["ema_adamw_step_"]), run(ema_adamw_step_))


def addressed(array: Any, device: torch.device) -> Tensor:
    """What torch does on a GPU: return a tensor of the addresses that an array names."""
    described = array.__cuda_array_interface__
    assert (described["typestr"], described["strides"], device.type) == ("|u1", None, "cuda")
    address, is_read_only = described["data"]
    assert not is_read_only
    values = (ctypes.c_uint8 * described["shape"][0]).from_address(address)
    return torch.frombuffer(values, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_states_are_at_the_addresses_of_pinned_memory(dtype: torch.dtype) -> None:
    pinned: list[Tensor] = []

    def empty(*shape: int, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        pinned.append(torch.zeros(*shape, dtype=dtype))
        return pinned[-1]

    memory = fused()["HostMapped"](torch.device("cuda", 1))
    with mock.patch.multiple(host_mapped.torch, empty=empty, as_tensor=addressed):
        mapped = memory.empty((3, 5), dtype)
    values = torch.arange(15).view(3, 5).to(dtype)
    memory.write(mapped, values)
    assert torch.equal(pinned[0].view(dtype).view(3, 5), values)
    assert pinned[0].nbytes == values.nbytes


def test_every_form_says_what_it_is_made_by_and_keeps_its_name() -> None:
    assert described().keys() == fused().keys()
    assert [compiled(form).__name__ for form in COMPILED] == [form.__name__ for form in COMPILED]
