"""Plugins that act without changing a number."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ascend_run.plugin_api import ForwardLink, LinkPlace, Manifest, Numerics, hookimpl
from ascend_run.plugin_api import contracts as c

Forward = Callable[..., Any]


def manifest(name: str, **more: Any) -> Manifest:
    return Manifest(name=name, summary="made for a test", numerics=Numerics.BITWISE, **more)


class Copies:
    """As an offload does where device and host share one memory."""

    manifest = manifest("copies", forward_links={"layer": LinkPlace.AROUND})

    @hookimpl
    def ascend_layer(self) -> c.ModuleWrapper:
        def wrap(inner: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                import torch

                hidden, *rest = inner(*args, **kwargs)
                torch.empty_like(hidden).copy_(hidden.detach())
                return (hidden, *rest)

            return forward

        return lambda layer: ForwardLink(wrap=wrap, compilable=False)


class SetsThreads:
    manifest = manifest("sets-threads")

    @hookimpl
    def ascend_process_settings(self) -> Mapping[str, AbstractContextManager[Any]]:
        return {"threads": self._threads()}

    @contextmanager
    def _threads(self) -> Iterator[None]:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        yield
        torch.set_num_threads(before)


class WritesAFile:
    manifest = manifest("writes-a-file")

    @hookimpl
    def ascend_after_log(self, context: c.RunContext, metrics: Mapping[str, Any]) -> None:
        folder = Path(context.config.run.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"losses.{time.time_ns()}.txt"
        (folder / name).write_text(str(metrics["loss"]), encoding="utf-8")


class Averages:
    """Keeps an average of the weights, which only its checkpoint entry holds."""

    manifest = manifest("averages")

    def __init__(self) -> None:
        self.average: Any = None

    def state_dict(self) -> Mapping[str, Any]:
        return {} if self.average is None else {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    @hookimpl
    def ascend_checkpoint_entries(self) -> Mapping[str, c.CheckpointEntry]:
        return {"averages": self}

    @hookimpl
    def ascend_after_step(self, context: c.RunContext) -> None:
        (bundle,) = context.models.values()
        weight = next(bundle.chunks[0].parameters()).detach()
        self.average = weight.clone() if self.average is None else (self.average + weight) / 2


class Measures:
    manifest = manifest("measures")

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, c.Metrics]:
        def norm(context: c.RunContext) -> Mapping[str, float]:
            (bundle,) = context.models.values()
            return {"norm": float(next(bundle.chunks[0].parameters()).detach().norm())}

        return {"measures": norm}


class Recomputes:
    manifest = manifest("recomputes", forward_links={"mlp": LinkPlace.AROUND})

    @hookimpl
    def ascend_mlp(self) -> c.ModuleWrapper:
        from functools import partial

        from torch.utils.checkpoint import checkpoint

        def wrap(inner: Forward) -> Forward:
            return partial(checkpoint, inner, use_reentrant=False)

        return lambda mlp: ForwardLink(wrap=wrap, compilable=False)


ACTING = {
    Copies: "copied",
    SetsThreads: "settings: torch's number of threads",
    WritesAFile: "files: losses.",
    Averages: "checkpoint: averages",
    Measures: "metrics that change: measures/norm",
    Recomputes: "saved for backward",
}
"""Plugin that acts -> how what is seen of it starts."""
