"""The device's random number generators, inside and outside of Megatron's forks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_run.plugins.platforms.cpu.device import CpuDevice
from ascend_run.testing.pool import GlooPool

from .random_draws import DRAWS, SEED, Drawn, draw_on_a_rank


@pytest.fixture
def tracker(active: CpuDevice) -> Any:
    """Build a tracker of the streams ``model-parallel-rng``, from SEED, and ``other``."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    made = CudaRNGStatesTracker()
    made.add("model-parallel-rng", SEED)
    made.add("other", SEED + 1)
    return made


# -- outside of a fork ------------------------------------------------------------------------


def test_dropout_draws_from_the_device_and_leaves_the_cpu_generator_alone(
    active: CpuDevice,
) -> None:
    x = torch.ones(1000, requires_grad=True)
    torch.manual_seed(1)  # seeds both, as on an accelerator
    cpu_state = torch.get_rng_state()
    first = F.dropout(x, 0.25)
    second = F.dropout(x, 0.25)
    assert torch.equal(torch.get_rng_state(), cpu_state)
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(1)
    torch.rand(3)  # the host's generator, not the device's
    assert torch.equal(F.dropout(x, 0.25), first)
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())


def test_dropout_keeps_the_edges_of_torch(active: CpuDevice) -> None:
    x = torch.ones(10)
    assert torch.equal(F.dropout(x, 0.5, training=False), x)
    assert F.dropout(x, 1.0).count_nonzero() == 0
    kept = x.clone()
    assert F.dropout(kept, 0.5, inplace=True) is kept
    with pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(x, 1.5)
    assert torch.cuda.default_generators[0] is not torch.default_generator


# -- in a fork --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_in_a_fork_is_the_forks_alone(
    tracker: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The draw equals one with the same seed, twice in a row; host and device states are
    unchanged."""
    draw = DRAWS[name]
    torch.manual_seed(SEED)
    wanted = [draw(), draw()]
    torch.manual_seed(1)
    before = (torch.get_rng_state(), torch.cuda.get_rng_state())
    found = []
    for _ in wanted:
        with tracker.fork():
            found.append(draw())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not torch.equal(found[0], found[1])
    after = (torch.get_rng_state(), torch.cuda.get_rng_state())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_generator_that_is_given_is_used_in_a_fork(tracker: Any) -> None:
    wanted = torch.rand(5, generator=torch.Generator().manual_seed(5))
    with tracker.fork():
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(5, generator=torch.Generator().manual_seed(5))
        assert torch.equal(torch.cuda.get_rng_state(), state)
        ours = torch.rand(5, generator=torch.cuda.default_generators[0])
    assert torch.equal(drawn, wanted)
    assert torch.equal(ours, torch.rand(5, generator=torch.Generator().manual_seed(SEED)))


def test_forks_within_forks_draw_each_from_its_own(
    tracker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host = torch.get_rng_state()
    with tracker.fork():
        found = [torch.rand(5)]
        with tracker.fork("other"):
            inner = torch.rand(5)
            with tracker.fork():
                found.append(torch.rand(5))
        found.append(F.dropout(torch.ones(5)))
    generator = torch.Generator().manual_seed(SEED)
    assert torch.equal(found[0], torch.rand(5, generator=generator))
    assert torch.equal(found[1], torch.rand(5, generator=generator))
    kept = torch.empty(5).bernoulli_(0.5, generator=generator)
    assert torch.equal(found[2], 2 * kept)
    assert torch.equal(inner, torch.rand(5, generator=torch.Generator().manual_seed(SEED + 1)))
    assert torch.equal(torch.get_rng_state(), host)
    assert caplog.records == []


def test_a_fork_that_fails_leaves_both_as_they_were(tracker: Any) -> None:
    before = (torch.get_rng_state(), torch.cuda.get_rng_state())
    with pytest.raises(ZeroDivisionError), tracker.fork():
        torch.rand(1 // 0)
    after = (torch.get_rng_state(), torch.cuda.get_rng_state())
    torch.testing.assert_close(after, before, rtol=0, atol=0)


# -- across ranks -----------------------------------------------------------------------------


def alike(one: Drawn, other: Drawn, fork: str) -> set[bool]:
    """Return whether two ranks drew the same, for each kind."""
    return {torch.equal(one[fork][name], other[fork][name]) for name in one[fork]}


def test_expert_parallel_ranks_draw_apart_for_experts_alone(gloo_pool: GlooPool) -> None:
    """Weights of different experts and random routing differ; replicated tensors do not."""
    one, other = gloo_pool.run(draw_on_a_rank, 2, expert_model_parallel_size=2, timeout=120)
    assert alike(one, other, "expert") == {False}
    assert alike(one, other, "routing") == {False}
    assert alike(one, other, "model") == {True}
    assert alike(one, other, "none") == {True}


def test_tensor_parallel_ranks_draw_apart_in_the_fork_alone(gloo_pool: GlooPool) -> None:
    """Independent of what each rank has drawn for its data."""
    one, other = gloo_pool.run(draw_on_a_rank, 2, tensor_model_parallel_size=2, timeout=120)
    assert alike(one, other, "model") == {False}
    assert alike(one, other, "none") == {True}


# -- recomputation ----------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_that_torchs_own_checkpoint_recomputes_is_the_same(
    active: CpuDevice, reentrant: bool
) -> None:
    x = torch.ones(200, requires_grad=True)
    out = checkpoint(lambda y: F.dropout(y, 0.5) * y, x, use_reentrant=reentrant)
    state = torch.cuda.get_rng_state()
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * out.detach())
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.fixture
def megatrons_fork(active: CpuDevice) -> Iterator[Callable[[], Any]]:
    """Yield the fork of the tracker that Megatron's checkpoint replays."""
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed(SEED, tp_rank=0, ep_rank=0, etp_rank=0)
    yield random.get_cuda_rng_tracker().fork
    random.get_cuda_rng_tracker().reset()


def test_every_draw_that_megatrons_checkpoint_recomputes_is_the_same(
    megatrons_fork: Callable[[], Any],
) -> None:
    """In the region, in forks of it and in nested forks; drawn before and after a dropout."""
    from megatron.core.tensor_parallel import checkpoint as megatrons_checkpoint

    def noisy(x: Tensor) -> Tensor:
        ones = torch.ones_like(x)
        noise = F.dropout(ones) * torch.rand_like(x)
        with megatrons_fork():
            noise *= F.dropout(ones) * torch.rand_like(x)
            with megatrons_fork():
                noise *= torch.randn_like(x)
            noise *= F.dropout(ones, 0.1)
        return x * (noise * torch.empty_like(x).exponential_())

    x = torch.ones(500, requires_grad=True)
    out = megatrons_checkpoint(noisy, False, x)
    torch.rand(3)
    states = (torch.get_rng_state(), torch.cuda.get_rng_state())
    out.sum().backward()
    assert x.grad is not None
    assert 0 < out.count_nonzero() < 200
    assert torch.equal(x.grad, out.detach())
    after = (torch.get_rng_state(), torch.cuda.get_rng_state())
    torch.testing.assert_close(after, states, rtol=0, atol=0)


def test_what_is_checkpointed_inside_a_fork_is_recomputed_alike(
    megatrons_fork: Callable[[], Any],
) -> None:
    """As a layer with sequence parallelism, which runs in a fork and draws a seed in it."""
    from megatron.core.tensor_parallel import checkpoint as megatrons_checkpoint

    def noisy(x: Tensor) -> Tensor:
        factor = torch.rand(())
        return F.dropout(x, 0.5) * x * factor

    x = torch.ones(200, requires_grad=True)
    with megatrons_fork():
        out = megatrons_checkpoint(noisy, False, x)
    states = (torch.get_rng_state(), torch.cuda.get_rng_state())
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * out.detach())
    after = (torch.get_rng_state(), torch.cuda.get_rng_state())
    torch.testing.assert_close(after, states, rtol=0, atol=0)
