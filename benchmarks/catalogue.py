"""All benchmarks, in the order of the table."""

from __future__ import annotations

import fnmatch

from . import (
    adapter_steps,
    chunked_loss,
    conversion,
    data_preparation,
    dispatch,
    end_to_end,
    expert_mlps,
    expert_steps,
    fingerprints,
    generation,
    gpu_experts,
    gpu_operators,
    gpu_step,
    largest_model,
    listeners,
    memory_pools,
    new_plugin,
    optimizer_states,
    packed_attention,
    plugin_steps,
    progress,
    quantised_base,
    ring_attention,
    serving,
    start_up,
    step_times,
    tuning,
    ulysses,
    virtual_ranks,
)
from .protocol import Benchmark


def all_benchmarks() -> list[Benchmark]:
    modules = (
        end_to_end,
        gpu_step,
        gpu_operators,
        gpu_experts,
        virtual_ranks,
        ring_attention,
        ulysses,
        packed_attention,
        chunked_loss,
        expert_mlps,
        dispatch,
        expert_steps,
        plugin_steps,
        adapter_steps,
        optimizer_states,
        quantised_base,
        memory_pools,
        largest_model,
        tuning,
        listeners,
        progress,
        fingerprints,
        step_times,
        start_up,
        new_plugin,
        data_preparation,
        conversion,
        generation,
        serving,
    )
    return [benchmark for module in modules for benchmark in module.benchmarks()]


def matching(pattern: str) -> list[Benchmark]:
    """Return benchmarks whose name contains the pattern (``*`` and ``?`` as in file names)."""
    wanted = f"*{pattern.lower()}*"
    return [b for b in all_benchmarks() if fnmatch.fnmatchcase(b.name.lower(), wanted)]
