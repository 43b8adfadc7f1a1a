"""Plugins around the training: listeners, metrics, checkpoints, files and process settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from ascend_run.plugin_api import contracts as c
from ascend_run.plugin_api import hookimpl

from .idle import Idle, manifest


class ListensAndReturns:
    """At once, from every event."""

    manifest = manifest("listens-and-returns")

    @hookimpl
    def ascend_before_run(self, context: c.RunContext) -> None: ...

    @hookimpl
    def ascend_before_step(self, context: c.RunContext) -> None: ...

    @hookimpl
    def ascend_after_step(self, context: c.RunContext) -> None: ...

    @hookimpl
    def ascend_after_log(self, metrics: Mapping[str, Any]) -> None: ...

    @hookimpl
    def ascend_after_checkpoint(self, path: str) -> None: ...

    @hookimpl
    def ascend_before_evaluation(self, context: c.RunContext) -> None: ...

    @hookimpl
    def ascend_after_evaluation(self, loss: float) -> None: ...

    @hookimpl
    def ascend_after_run(self) -> None: ...


class WaitsForTheOtherRanks:
    """Before every step, on two ranks."""

    manifest = manifest("waits-for-the-other-ranks")

    @hookimpl
    def ascend_before_step(self) -> None:
        from torch import distributed as dist

        dist.barrier()


class MeasuresNothing:
    """A metric that counts steps, and one that is always zero."""

    manifest = manifest("measures-nothing")

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, c.Metrics]:
        return {"nothing": lambda context: {"steps": float(context.step), "zero": 0.0}}


class SavesConstants:
    """Checkpoint entries that never change or count steps, a filter and a store that do nothing."""

    manifest = manifest("saves-constants")

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> Mapping[str, Any]:
        import torch

        return {"version": 1, "steps": torch.tensor([self.steps]), "ones": torch.ones(3)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    @hookimpl
    def ascend_after_step(self) -> None:
        self.steps += 1

    @hookimpl
    def ascend_checkpoint_entries(self) -> Mapping[str, c.CheckpointEntry]:
        return {"saves-constants": self}

    @hookimpl
    def ascend_checkpoint_filter(self) -> Callable[[Any], Any]:
        return lambda shards: [*shards]

    @hookimpl
    def ascend_checkpoint_transfer(self) -> Callable[[Any], Any]:
        return lambda store: store


class WritesAnEmptyFile:
    manifest = manifest("writes-an-empty-file")

    @hookimpl
    def ascend_after_log(self, context: c.RunContext) -> None:
        folder = Path(context.config.run.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "empty.txt").touch()


class PatchesByTheSame:
    """Its patches: a function by itself, and by one that calls it."""

    manifest = manifest("patches-by-the-same")

    @hookimpl
    def ascend_patches(self) -> Sequence[c.Patch]:
        import torch.nn.functional as F

        from ascend_run.core.patches import source_hash

        def patch(name: str, replacement: Any) -> c.Patch:
            return c.Patch(
                target=f"torch.nn.functional:{name}",
                replacement=replacement,
                why="a plugin that does nothing",
                versions=">0",
                source_hash=source_hash(getattr(F, name)),
                until="never",
                wraps=True,
            )

        return [
            patch("silu", lambda inner: inner),
            patch("embedding", lambda inner: lambda *args, **kwargs: inner(*args, **kwargs)),
        ]


class SetsWhatIsSet:
    """Process settings that have their value already, a variable that nothing reads, around phases
    a context that does nothing, and no room where memory runs out."""

    manifest = manifest("sets-what-is-set")

    @hookimpl
    def ascend_environment(self) -> Mapping[str, str]:
        return {"NOBODY_READS_THIS": "1"}

    @hookimpl
    def ascend_process_settings(self) -> Mapping[str, AbstractContextManager[Any]]:
        return {"nothing": nullcontext(), "threads": self._threads()}

    @hookimpl
    def ascend_phase(self, phase: c.RunPhase) -> Callable[[], AbstractContextManager[None]] | None:
        return None if phase is c.RunPhase.UPDATE else nullcontext

    @hookimpl
    def ascend_out_of_memory(self) -> Callable[[], bool]:
        return lambda: False

    @contextmanager
    def _threads(self) -> Iterator[None]:
        import torch

        torch.set_num_threads(torch.get_num_threads())
        yield


class MakesAGroup:
    """Of two ranks, which nothing uses."""

    manifest = manifest("makes-a-group")

    @hookimpl
    def ascend_process_groups(self, layout: c.Layout) -> Mapping[str, Sequence[Sequence[int]]]:
        return {"unused": [[*range(layout.world_size)]]}


class PlansOnly:
    """No default, a check without problems, a panel, and a cost that is not true."""

    manifest = manifest("plans-only")

    @hookimpl
    def ascend_defaults(self) -> Mapping[str, object]:
        return {}

    @hookimpl
    def ascend_check(self) -> Sequence[str]:
        return ()

    @hookimpl
    def ascend_report(self) -> Sequence[c.ReportPanel]:
        return [c.ReportPanel(title="Nothing", metrics=("loss",), unit="")]

    @hookimpl
    def ascend_cost(self) -> c.CostChange:
        return c.CostChange(buffers={"none": 1.0})

    @hookimpl
    def ascend_comm_options(self) -> Mapping[str, c.CommOptions]:
        return {}


_TWO_RANKS: Final = {"dp": 2}
PLUGINS: Final = (
    Idle(plugin=ListensAndReturns),
    Idle(plugin=WaitsForTheOtherRanks, layout=_TWO_RANKS),
    Idle(plugin=MeasuresNothing),
    Idle(plugin=SavesConstants),
    Idle(plugin=WritesAnEmptyFile),
    Idle(plugin=PatchesByTheSame),
    Idle(plugin=SetsWhatIsSet),
    Idle(plugin=MakesAGroup, layout=_TWO_RANKS),
    Idle(plugin=PlansOnly),
)
