"""Train one system for some steps in a fresh process; prints one JSON line.

Each system uses its own model class, loss and optimizer. Weights, data, threads, the constants of
AdamW and the learning rate are the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from benchmarks import llama, peer_steps
from benchmarks.peer_steps import Setting, Step


def ascend_run(given: Setting, *enable: str) -> Step:
    """Return the complete step of a run: float32 master weights, clipping, schedule."""
    precision = next(name for name, value in llama.DTYPES.items() if value is given.dtype)
    return opened(given.shape, precision, given.device, enable)


def opened(
    shape: llama.Shape,
    precision: str,
    device: str = "cpu",
    enable: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Step:
    """Return the step of ``our_run.training``, which stays open until the process ends."""
    from benchmarks.our_run import training

    run = training(shape, precision, device, enable, options)
    step = run.__enter__()

    def kept(index: int, *, keep_open: object = run) -> float:
        return step(index)

    return kept


SYSTEMS: Final[Mapping[str, Callable[[Setting], Step]]] = {
    "ascend-run": ascend_run,
    "ascend-run-compiled": lambda given: ascend_run(given, "compile"),
    "ascend-run-experts": lambda given: ascend_run(given, "gmm", "moe-permute-fusion"),
    "ascend-run-low-precision-optimizer": lambda given: ascend_run(
        given, "low-precision-optimizer"
    ),
    "ascend-run-recompute-activation": lambda given: ascend_run(given, "recompute-activation"),
    "ascend-run-reuse-fp32-param": lambda given: ascend_run(given, "reuse-fp32-param"),
    "ascend-run-fused": lambda given: ascend_run(given, "rms-norm", "swiglu", "rotary"),
    "megatron-local": peer_steps.megatron_local,
    "litgpt": peer_steps.litgpt,
    "litgpt-compiled": functools.partial(peer_steps.litgpt, compiled=True),
    "transformers": peer_steps.transformers,
    "transformers-compiled": functools.partial(peer_steps.transformers, compiled=True),
    "transformers-liger-compiled": peer_steps.transformers_liger,
}


def measure(step: Step, given: Setting, warmup: int, steps: int) -> dict[str, Any]:
    """Return the losses of all steps, and the speed after the warm-up."""
    losses = [step(index) for index in range(warmup)]
    seconds = []
    for index in range(warmup, warmup + steps):
        _finish(given.device)
        begin = time.perf_counter()
        losses.append(step(index))
        _finish(given.device)
        seconds.append(time.perf_counter() - begin)
    return {
        "tokens_per_second": given.shape.tokens / statistics.median(seconds),
        "losses": losses,
        "peak_bytes": _peak_bytes(given.device),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else None,
    }


def _finish(device: str) -> None:
    """Wait for all queued GPU kernels."""
    if device == "cuda":
        torch.cuda.synchronize()


def _peak_bytes(device: str) -> int:
    """Peak memory of the GPU's tensors, or of the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--dtype", choices=llama.DTYPES, required=True)
    parser.add_argument("--shape", choices=llama.SHAPES, default="36m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    given = Setting(
        shape=llama.SHAPES[options.shape],
        dtype=llama.DTYPES[options.dtype],
        device=options.device,
    )
    step = SYSTEMS[options.system](given)
    print(json.dumps(measure(step, given, options.warmup, options.steps)))


if __name__ == "__main__":
    main()
