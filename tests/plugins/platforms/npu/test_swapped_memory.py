"""Tensors of the NPU in memory of the host: copies in every bit, and AdamW as torch's.

The reference of that memory refuses operators that its documentation does not list.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from ascend_run.plugins.platforms.npu.forms import FORMS, swapped_memory
from ascend_run.plugins.platforms.npu.forms.swapped_memory import SwappedMemory
from ascend_run.plugins.platforms.npu.proof.recording import Recorder

from .reference.swapped_memory import values_of

CPU = torch.device("cpu")
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_copies_keep_every_bit(dtype: torch.dtype) -> None:
    """In parts, also over values that are no numbers, and of zeros of both signs."""
    memory = SwappedMemory(CPU)
    values = torch.tensor([1.5, -0.0, 0.0, torch.inf, -torch.inf, -3e-5, 6e4], dtype=dtype)
    mapped = memory.empty((7, 3), dtype)
    for given in (values[:, None].expand(7, 3), values.flip(0)[:, None].repeat(1, 3)):
        with mock.patch.object(swapped_memory, "COPIED_AT_ONCE", 4):
            memory.write(mapped, given)
            found = memory.read(mapped)
        assert type(found) is Tensor
        for copy in (found, values_of(mapped)):
            assert torch.equal(copy.view(BITS[dtype]), given.contiguous().view(BITS[dtype]))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["64", "32"]
)
def test_steps_of_adamw_are_torchs(dtype: torch.dtype, tolerance: float) -> None:
    """Of parameters whose numbers of steps differ, with moments on the host or not."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((5, 3), (7,))]
    ours, theirs = ([value.clone().requires_grad_() for value in start] for _ in range(2))
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(theirs, fused=True, **options)  # type: ignore[arg-type]
    memory = SwappedMemory(CPU)
    states = [{"step": torch.zeros(())} for _ in ours]
    for parameter, state, on_host in zip(ours, states, (True, False), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter)
            if on_host:
                zeros, state[name] = state[name], memory.empty(parameter.shape, dtype)
                memory.write(state[name], zeros)
    for step in range(4):
        count = 1 if step == 0 else 2
        for own, other in zip(ours[:count], theirs, strict=False):
            own.grad = torch.randn(own.shape, generator=generator, dtype=dtype)
            other.grad = own.grad.clone()
        optimizer.step()
        with torch.no_grad():
            memory.adamw_step_(options, ours[:count], states[:count])
    for own, other, state in zip(ours, theirs, states, strict=True):
        wanted = optimizer.state[other]
        assert state["step"] == wanted["step"]
        pairs = [(own.detach(), other.detach())]
        pairs += [(values_of(state[name]), wanted[name]) for name in ("exp_avg", "exp_avg_sq")]
        for found, want in pairs:
            assert (found - want).abs().max() <= tolerance * want.abs().max()


def test_it_calls_every_operator_that_it_declares(checked_calls: Recorder) -> None:
    test_copies_keep_every_bit(torch.float32)
    called = {call.operator for call in checked_calls.calls}
    assert called == {*FORMS["HostMapped"].calls}


@pytest.mark.parametrize("operation", [Tensor.clone, Tensor.mul_, Tensor.copy_], ids=str)
def test_the_reference_refuses_other_operators(operation: Callable[..., object]) -> None:
    mapped = SwappedMemory(CPU).empty((3,), torch.float32)
    others = () if operation is Tensor.clone else (torch.ones(3),)
    with pytest.raises(AssertionError, match="does not take memory of the host"):
        operation(mapped, *others)
