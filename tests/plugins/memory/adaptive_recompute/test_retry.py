"""Steps in which memory runs out: the budget is lowered until there is room, and no bit changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import attrs
import pytest
import torch
from structlog.testing import capture_logs

from ascend_run.plugin_api import ConfigError
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import PLATFORM_VARIABLE
from tests.support.costs import planned
from tests.support.limited_memory import LimitedMemory
from tests.support.small_runs import Training, training

NAME: Final = "adaptive-recompute"
RETRY: Final = {f"plugins.{NAME}.retry": True, f"plugins.{NAME}.profiled_steps": 2}
LEAST: Final = {f"plugins.{NAME}.activation_mb": 1e-4, f"plugins.{NAME}.profiled_steps": 1}
STEPS: Final = 7
LONG: Final = {
    "model.num_layers": 4,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "data.seq_length": 64,
    "train.global_batch_size": 2,
}


@attrs.define(kw_only=True)
class Ran:
    """What some steps did."""

    losses: list[float]
    tensors: list[torch.Tensor]  #: Weights, and the states of all generators.
    peak: int = 0  #: Of the last step.
    failures: list[int] = attrs.field(factory=list)  #: By step.
    begun: list[int] = attrs.field(factory=list)  #: Bytes that there were before each try.
    chosen: dict[str, str] = attrs.field(factory=dict)
    expected: int = 0
    budget: int = 0
    settled: bool = False
    logged: list[dict[str, Any]] = attrs.field(factory=list)


def ran(values: Mapping[str, Any], plugins: tuple[str, ...], limit: float, steps: int) -> Ran:
    """Train with as much memory for forward and backward. A rank's job."""
    memory = LimitedMemory()
    memory.limit = limit
    with training(values, plugins, memory.plugin()) as run, capture_logs() as events:
        found = Ran(losses=[], tensors=[])
        for _ in range(steps):
            memory.peak, memory.failures = 0, 0
            found.losses.append(run.step_with_events().loss)
            found.failures.append(memory.failures)
        finish(found, run)
    found.peak, found.begun = memory.peak, memory.begun
    found.logged = [dict(event) for event in events if event["event"].startswith(NAME)]
    return found


def finish(found: Ran, run: Training) -> None:
    """Note what the run is in the end."""
    from ascend_run.core.train.seeding import random_state

    states = random_state().state_dict()
    tensors = [*run.parameters.values(), *(states[name] for name in sorted(states))]
    found.tensors = [tensor.cpu().clone() for tensor in tensors]
    for plugin in run.hooks.plugins:
        if plugin.manifest.name == NAME:
            state: Any = plugin
            tuner = state._tuner
            found.chosen, found.expected = tuner.decision.by_layer(), tuner.decision.expected
            found.budget = tuner.budget
            found.settled = tuner.search is not None and tuner.search.is_settled


def all_three(
    values: Mapping[str, Any], share: float, own: Mapping[str, Any] = RETRY
) -> tuple[Ran, Ran, Ran]:
    """Train with nothing recomputed, with all layers, and with memory for some. A rank's job."""
    plain = ran(values, (), float("inf"), STEPS)
    least = ran({**values, **LEAST}, (NAME,), float("inf"), 3)
    limit = least.peak + share * (plain.peak - least.peak)
    return plain, least, ran({**values, **own}, (NAME,), limit, STEPS)


def assert_equal(found: Ran, plain: Ran) -> None:
    """No bit differs."""
    assert found.losses == plain.losses
    assert all(map(torch.equal, found.tensors, plain.tensors))


def test_the_budget_is_lowered_until_there_is_room(gloo_pool: GlooPool) -> None:
    ((plain, least, found),) = gloo_pool.run(all_three, 1, {**MOE, **LONG}, 0.5)
    assert_equal(found, plain)
    assert found.failures[0] > 0
    assert found.failures[-1] == 0
    assert least.peak <= found.peak <= (least.peak + plain.peak) / 2
    assert found.settled
    assert found.expected <= found.budget
    assert {*found.chosen.values()} not in ({"nothing"}, {"layer"})
    events = [event["event"].removeprefix(f"{NAME}.") for event in found.logged]
    assert events[:2] == ["out_of_memory", "chosen"]
    assert events.count("out_of_memory") == sum(found.failures)
    assert events[-1] == "measured"
    first, *_ = found.logged
    assert first["step"] == 1
    assert first["budget_bytes"] < first["kept_bytes"]
    assert found.logged[-1]["bytes"] == found.logged[-1]["expected_bytes"] == found.expected


def test_no_budget_is_above_the_one_that_is_given(gloo_pool: GlooPool) -> None:
    """Where memory runs out though there would be room for more."""
    given = 64 << 10
    own = {**RETRY, f"plugins.{NAME}.activation_mb": given / (1 << 20)}
    ((plain, _, found),) = gloo_pool.run(all_three, 1, {**DENSE, **LONG}, 0.5, own)
    assert_equal(found, plain)
    failed = [event for event in found.logged if event["event"] == f"{NAME}.out_of_memory"]
    assert failed[0]["kept_bytes"] > 2 * given
    assert {event["budget_bytes"] for event in failed} == {given}
    assert found.expected <= found.budget == given
    assert found.settled


def warned(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the plugin says before a run. A rank's job."""
    with capture_logs() as logs, training(values, (NAME,)) as run:
        run.hooks.event("ascend_before_run")(context=run.context)
    return [(log["event"], log["changes_nothing_as"]) for log in logs if log.get("plugin") == NAME]


def test_on_the_cpu_it_says_that_it_never_retries(gloo_pool: GlooPool) -> None:
    why = "the CPU raises no torch.OutOfMemoryError, which retry=true waits for"
    values = {**DENSE, "platform": "cpu"}
    assert gloo_pool.run(warned, 1, {**values, **RETRY}) == [[("plugin.idle", why)]]
    both = {**values, **LEAST, **RETRY}
    assert gloo_pool.run(warned, 1, both) == [[(f"{NAME}.never_retries", why)]]
    assert gloo_pool.run(warned, 1, {**values, **LEAST}) == [[]]


def test_with_enough_memory_nothing_is_recomputed(gloo_pool: GlooPool) -> None:
    (found,) = gloo_pool.run(ran, 1, {**DENSE, **RETRY}, (NAME,), float("inf"), 4)
    assert {*found.chosen.values()} == {"nothing"}
    assert [event["event"] for event in found.logged] == [f"{NAME}.chosen", f"{NAME}.measured"]
    assert found.logged[0]["budget_bytes"] is None


def too_little(values: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[int]]:
    """Train with less memory than layers need that keep nothing; return what was chosen each time,
    and the bytes that were allocated before each try but the first. A rank's job."""
    least = ran({**values, **LEAST}, (NAME,), float("inf"), 3)
    memory = LimitedMemory()
    memory.limit = 0.6 * least.peak
    with training({**values, **RETRY}, (NAME,), memory.plugin()) as run, capture_logs() as events:
        with pytest.raises(torch.OutOfMemoryError, match="bytes are more than"):
            run.step_with_events()
        assert run.context.step == 0
    chosen = [event["layers"] for event in events if event["event"] == f"{NAME}.chosen"]
    return chosen, memory.begun[1:]


def test_the_error_is_raised_once_layers_keep_as_little_as_they_can(gloo_pool: GlooPool) -> None:
    ((chosen, begun),) = gloo_pool.run(too_little, 1, {**DENSE, **LONG})
    assert {*chosen[-1].values()} == {"layer"}
    assert {len(layers) for layers in chosen} == {4}, "also those that had not run"
    assert all({*layers.values()} != {"layer"} for layers in chosen[:-1])
    assert len(begun) == len(chosen) > 2
    assert len({*begun}) == 1, "a try has left something behind"


def test_a_budget_or_retry_must_be_given_and_retry_is_for_one_rank() -> None:
    assert planned({**DENSE, **RETRY}, (NAME,))
    with pytest.raises(ConfigError, match=r"activation_mb is not set; .*retry=true"):
        planned(DENSE, (NAME,))
    with pytest.raises(ConfigError, match=r"retry=true is for one rank: of 2, the others would"):
        planned({**DENSE, **RETRY}, (NAME,), 2)
    with pytest.raises(ConfigError, match=r"retry=true cannot start the reductions of ddp.overlap"):
        planned({**DENSE, **RETRY, "ddp.overlap_grad_reduce": True}, (NAME,))


WIDE: Final = {
    **DENSE,
    **LONG,
    "platform": "cuda",
    "model.num_layers": 8,
    "model.hidden_size": 512,
    "model.ffn_hidden_size": 1024,
    "data.seq_length": 2048,
}
"""More than the caching allocator's blocks of 20 MiB."""


@contextmanager
def memory_of(nbytes: float) -> Iterator[None]:
    """Let this process have as many bytes of its GPU."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(nbytes / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def on_gpu(
    values: Mapping[str, Any], plugins: tuple[str, ...], steps: int, nbytes: float | None = None
) -> Ran:
    """Train, with as much memory of the GPU; ``peak`` is what the allocator has reserved."""
    found = Ran(losses=[], tensors=[])
    with training(values, plugins) as run, capture_logs() as events:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with memory_of(nbytes or torch.cuda.mem_get_info()[1]):
            for _ in range(steps):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                found.losses.append(run.step_with_events().loss)
        found.peak = torch.cuda.max_memory_reserved()
        finish(found, run)
    found.logged = [dict(event) for event in events if event["event"].startswith(NAME)]
    return found


def all_three_on_gpu(share: float) -> tuple[Ran, Ran, Ran]:
    """The same as ``all_three``, by the limit of torch's allocator. A rank's job."""
    plain = on_gpu(WIDE, (), STEPS)
    least = on_gpu({**WIDE, **LEAST}, (NAME,), 3)
    limit = least.peak + share * (plain.peak - least.peak)
    return plain, least, on_gpu({**WIDE, **RETRY}, (NAME,), STEPS, limit)


def with_a_share(pool: GlooPool, share: float) -> Ran:
    """Train with memory for some, and compare with the run that has memory for all. On a GPU by the
    limit of torch's allocator, which the CPU has not."""
    if os.environ.get(PLATFORM_VARIABLE) == "cuda":
        ((plain, least, found),) = pool.run(all_three_on_gpu, 1, share)
    else:
        ((plain, least, found),) = pool.run(all_three, 1, {**DENSE, **LONG}, share)
    assert_equal(found, plain)
    assert any(event["event"] == f"{NAME}.out_of_memory" for event in found.logged)
    assert found.peak <= least.peak + share * (plain.peak - least.peak)
    assert {*found.chosen.values()} != {"nothing"}
    return found


def test_more_is_kept_where_the_limit_of_the_allocator_is_higher(gloo_pool: GlooPool) -> None:
    lower, higher = (with_a_share(gloo_pool, share) for share in (0.5, 0.75))
    assert lower.peak < higher.peak
    assert lower.expected < higher.expected
