"""Jobs for gloo ranks: runs whose folders ``diff`` compares, as the command would leave them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ascend_run.testing.models import DENSE
from tests.support.fake_plugins import plugin
from tests.support.probed_runs import probe
from tests.support.small_runs import prepare, rank_environment

STEPS = 6
VALUES: Mapping[str, Any] = {
    **DENSE,
    "train.train_iters": STEPS,
    "train.global_batch_size": 2,
    "optimizer.lr_decay_iters": STEPS,
    "optimizer.lr_warmup_iters": 0,
}


class Died(Exception):
    """Stands for whatever ends a run."""


def run(
    folder: str,
    values: Mapping[str, Any],
    *,
    die_at: int | None = None,
    flip_at: int | None = None,
    added_at: int | None = None,
) -> None:
    """Train into ``folder/run``.

    Args:
        values: On top of ``VALUES``.
        die_at: Step before which the run dies, as if it were killed.
        flip_at: Step after which one bit of one weight flips.
        added_at: Step after which another plugin, which is listed, moves a weight.
    """
    from ascend_run.core.run import run_training

    def die(self: Any, context: Any) -> None:
        if context.step == die_at:
            raise Died

    def flip(self: Any, context: Any) -> None:
        if context.step == flip_at:
            _norm_weight(context).view(torch.int32)[-1] ^= 1

    def move(self: Any, context: Any) -> None:
        if context.step == added_at:
            _norm_weight(context).mul_(1.25)

    probes = [probe("ascend_before_step", die, "die"), probe("ascend_after_step", flip, "flip")]
    with rank_environment() as size:
        prepared = prepare({**VALUES, **values, "run.output_dir": folder}, (), size)
        if added_at is not None:
            probes.append(plugin("added", {"ascend_after_step": move})())
            listed = {"distribution": "x", "version": "1", "sha256": "0" * 64}
            prepared = attrs.evolve(
                prepared,
                plan=attrs.evolve(
                    prepared.plan,
                    plugins=(
                        attrs.evolve(prepared.plan.plugins[0], name="added"),
                        *prepared.plan.plugins,
                    ),
                ),
            )
        request = prepared.run_request(*probes)
        if added_at is not None:
            request = attrs.evolve(request, lock={**request.lock, "added": listed})
        try:
            run_training(request)
        except Died:
            assert die_at is not None
        if dist.is_initialized():
            dist.barrier()


def _norm_weight(context: Any) -> Any:
    """One of 32 elements, all of which are sampled; detached."""
    (chunk,) = context.models["policy"].chunks
    return chunk.module.decoder.final_layernorm.weight.detach()


def tokens(folder: Path, seed: int) -> str:
    """A dataset of 40 documents; another seed has other contents of the same size."""
    import random

    from ascend_run.text.dataset_paths import bin_path, idx_path
    from ascend_run.text.indexed import IndexedWriter, dtype_for

    folder.mkdir(parents=True, exist_ok=True)
    prefix = str(folder / "tokens")
    drawn = random.Random(seed)
    with bin_path(prefix).open("wb") as stream:
        writer = IndexedWriter(stream, dtype_for(90))
        for _ in range(40):
            writer.add([drawn.randrange(90) for _ in range(20)])
    idx_path(prefix).write_bytes(writer.index())
    return prefix
