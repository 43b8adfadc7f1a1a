"""Steps of a task with features beside it, on packed rows and on rows of one record, as jobs for
the pool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import attrs

from ascend_run.plugin_api import AscendRunError, Manifest, hookimpl
from ascend_run.plugin_api import contracts as c
from ascend_run.testing.models import trial_layout
from ascend_run.testing.pool import GlooPool
from ascend_run.types.layout import world_size
from benchmarks.campaigns.features import OPTIONS
from benchmarks.campaigns.tiny_runs import data_folder, prepare
from benchmarks.campaigns.watched_runs import readings, train_beside

from .unequal_records import DOCUMENTS, HELD, LENGTH, NUM_RECORDS, write_records

LAYOUTS: Final[Mapping[str, tuple[str, Mapping[str, int]]]] = {
    "one rank": ("dense", {}),
    "dp=2": ("dense", {"dp": 2}),
    "tp=2": ("dense", {"tp": 2}),
    "vpp=2": ("dense", {"pp": 2, "vpp": 2}),
    "cp=2": ("dense", {"cp": 2}),
    "ep=2": ("moe", {"dp": 2, "ep": 2}),
    "tp=2, ep=2": ("moe", {"tp": 2, "ep": 2}),
    "cp=2, ep=2": ("moe", {"cp": 2, "ep": 2}),
}
_VALUES: Final[Mapping[str, Mapping[str, Any]]] = {
    "dp=2": {"ddp.use_distributed_optimizer": True, "train.micro_batch_size": 2},
}
"""Layout -> what else it shows: there, two rows are joined in a micro-batch."""
OPTIONS_HERE: Final = {**OPTIONS, "plugins.virtual-optimizer.folder": "."}
"""On the CPU its states go to files, which have no names and so need no folder of their own."""
STEPS: Final = 3


@attrs.frozen(kw_only=True)
class Run:
    """What is asked, beside the task."""

    enable: tuple[str, ...] = ()
    where: str = "one rank"
    """Name of a layout."""
    packing: bool
    values: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Ran:
    """What a run of ``STEPS`` epochs said."""

    values: Sequence[float] = ()
    """Loss and norm of the gradient of each step."""
    weights: Sequence[str] = ()
    """Hash of the weights after each step."""
    idle: frozenset[str] = frozenset()
    """Plugins that had nothing to do."""
    refused: str = ""
    """Why planning did not take it."""


Steps = Callable[[Run], Ran]


def feature_steps(gloo_pool: GlooPool, task: str) -> Steps:
    """Return what runs a task; what has been run is not run again."""
    file = write_records(data_folder(), task)

    @cache
    def ran(text: str) -> Ran:
        run = Run(**json.loads(text))
        out = Path(mkdtemp(dir=data_folder()))
        asked = _asked(task, file, out, run)
        size = world_size(LAYOUTS[run.where][1])
        try:
            prepared = prepare(data_folder(), **asked, world_size=size)
        except AscendRunError as error:
            return Ran(refused="; ".join((error.headline, *error.problems)))
        held = gloo_pool.run(documents_of_rows, size, data_folder(), asked, timeout=100)
        _assert_rows(task, run.packing, [row for of_rank in held for row in of_rank])
        lines = [line for line in readings(out) if line.get("batch")]
        assert len(lines) == STEPS
        return Ran(
            values=[line[name] for line in lines for name in ("loss", "grad_norm")],
            weights=[line["parameters"] for line in lines],
            idle=frozenset(prepared.plan.idle),
        )

    return lambda run: ran(json.dumps(attrs.asdict(run), sort_keys=True))


def _asked(task: str, file: Path, out: Path, run: Run) -> dict[str, Any]:
    """Return arguments of ``tiny_runs.prepare``."""
    model, layout = LAYOUTS[run.where]
    values = {
        "data.train": [str(file)],
        "model.num_layers": 4,
        **_VALUES.get(run.where, {}),
        **run.values,
        "data.seq_length": LENGTH,
        "run.output_dir": str(out),
        "model.moe_aux_loss_coeff": 0.0,  # it balances padding too
        "train.train_iters": STEPS,
        "train.global_batch_size": len(HELD) if run.packing else NUM_RECORDS,
        "train.eval_interval": 0,
        "checkpoint.save_interval": 0,
        f"plugins.{task}.packing": run.packing,
        **{k: v for k, v in OPTIONS_HERE.items() if k.split(".")[1] in run.enable},
        **trial_layout(layout),
    }
    return {"enable": [*run.enable], "task": task, "model": model, "values": values}


class Rows:
    """A plugin that counts the documents of the rows that are read."""

    manifest = Manifest(name="rows", summary="count documents")

    def __init__(self, plugins: Sequence[Any]) -> None:
        self.documents: list[int] = []

    @hookimpl
    def ascend_batch(self) -> c.Wrapper[c.BatchIterator]:
        return self._count

    def _count(self, batches: Iterator[c.Batch]) -> Iterator[c.Batch]:
        for batch in batches:
            self.documents += [len(ends) for ends in batch.row_ends or [(LENGTH,)]]
            yield batch


def documents_of_rows(folder: Path, asked: Mapping[str, Any]) -> list[int]:
    """A job: train, and return the number of documents of each row that this rank read."""
    return train_beside(Rows, folder, asked).documents


def _assert_rows(task: str, packing: bool, documents: Sequence[int]) -> None:
    """Check that rows are packed, or hold one record each; ranks may read the same ones."""
    wanted = {*HELD} if packing else {1}
    assert {*documents} == {DOCUMENTS[task] * number for number in wanted}
    each = NUM_RECORDS // len(HELD) if packing else 1
    assert sum(documents) == len(documents) * DOCUMENTS[task] * each
