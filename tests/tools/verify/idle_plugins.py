"""Plugins that do nothing in many ways, and some that act without changing a number."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs

from ascend_run.plugin_api import ForwardLink, LinkPlace, Manifest, Numerics, hookimpl
from ascend_run.plugin_api import contracts as c

LINKED = ("layer", "linear", "mlp", "self_attention", "embedding", "model", "output_layer")
Forward = Callable[..., Any]


def manifest(name: str, **more: Any) -> Manifest:
    return Manifest(name=name, summary="made for a test", numerics=Numerics.BITWISE, **more)


def linking(name: str) -> Manifest:
    return manifest(name, forward_links=dict.fromkeys(LINKED, LinkPlace.AROUND))


class Links:
    """Base: links the forward of every layer with ``change`` of its output."""

    def change(self, output: Any) -> Any:
        return output

    @hookimpl
    def ascend_layer(self) -> c.ModuleWrapper:
        def wrap(inner: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                hidden, *rest = inner(*args, **kwargs)
                return (self.change(hidden), *rest)

            return forward

        return lambda layer: ForwardLink(wrap=wrap, compilable=False)


class ReturnsNone:
    """From every wrapper of a module."""

    manifest = manifest("returns-none")

    @hookimpl
    def ascend_layer(self) -> None: ...

    @hookimpl
    def ascend_linear(self) -> None: ...

    @hookimpl
    def ascend_output_layer(self) -> None: ...

    @hookimpl
    def ascend_attention(self) -> None: ...

    @hookimpl
    def ascend_optimizer(self) -> None: ...

    @hookimpl
    def ascend_router(self) -> None: ...


class ReturnsWhatItWraps:
    manifest = manifest("returns-what-it-wraps")

    @hookimpl
    def ascend_layer(self) -> Callable[[Any], Any]:
        return lambda layer: layer

    @hookimpl
    def ascend_output_layer(self) -> Callable[[Any], Any]:
        return lambda layer: layer

    @hookimpl
    def ascend_fused_operators(self) -> Callable[[Any], Any]:
        return lambda ops: attrs.evolve(ops)

    @hookimpl
    def ascend_configure(self) -> Callable[[Any], Any]:
        return lambda arguments: {**arguments}

    @hookimpl
    def ascend_schedule(self) -> Callable[[Any], Any]:
        return lambda inner: lambda *args, **kwargs: inner(*args, **kwargs)

    @hookimpl
    def ascend_batch(self) -> Callable[[Any], Any]:
        return lambda batches: (batch for batch in batches)


class OnlyCalls(Links):
    manifest = linking("only-calls")

    def __init__(self) -> None:
        self.calls = 0

    def change(self, output: Any) -> Any:
        self.calls += 1
        return output

    @hookimpl
    def ascend_metrics(self) -> Mapping[str, c.Metrics]:
        return {"only-calls": lambda context: {"calls": float(self.calls), "zero": 0.0}}


class ScalesByOne(Links):
    manifest = linking("scales-by-one")

    def change(self, output: Any) -> Any:
        return output * 1.0


class NeverReachesItsThreshold(Links):
    manifest = linking("never-reaches-its-threshold")

    def change(self, output: Any) -> Any:
        if bool((output.abs() > 1e9).any()):
            return output.clamp(-1e9, 1e9)
        return output


class ClampsNothing(Links):
    manifest = linking("clamps-nothing")

    def change(self, output: Any) -> Any:
        return output.clamp(-1e9, 1e9)


class Reshapes(Links):
    manifest = linking("reshapes")

    def change(self, output: Any) -> Any:
        return output.reshape(-1).view(output.shape).clone()


class ChecksForNan(Links):
    manifest = linking("checks-for-nan")

    def change(self, output: Any) -> Any:
        assert bool(output.isfinite().all())
        return output


class HoldsSavedTensors:
    """Its saved-tensor hooks return what they are given."""

    manifest = linking("holds-saved-tensors")

    @hookimpl
    def ascend_layer(self) -> c.ModuleWrapper:
        from torch.autograd.graph import saved_tensors_hooks

        def wrap(inner: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                with saved_tensors_hooks(lambda x: x, lambda x: x):
                    return inner(*args, **kwargs)

            return forward

        return lambda layer: ForwardLink(wrap=wrap, compilable=False)


class HooksGradients:
    manifest = manifest("hooks-gradients")

    @hookimpl
    def ascend_model(self) -> Callable[[Any], Any]:
        def wrap(model: Any) -> Any:
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: None)
            return model

        return wrap


class MatchesNoLayer(Links):
    manifest = linking("matches-no-layer")

    @hookimpl
    def ascend_linear(self, name: str, layer_index: int) -> c.ModuleWrapper | None:
        wanted = layer_index > 90 or name == "no.such.linear"
        return (lambda linear: linear) if wanted else None


class Delegates:
    """An attention kernel that calls the inner one."""

    manifest = manifest("delegates", attention=c.AttentionFeatures.all_but())

    @hookimpl
    def ascend_attention(self) -> Callable[[c.AttentionKernel], c.AttentionKernel]:
        return DelegatingKernel


class DelegatingKernel:
    def __init__(self, inner: c.AttentionKernel) -> None:
        self.inner, self.features = inner, inner.features
        self.backward_reads = inner.backward_reads

    def forward(self, *args: Any) -> c.AttentionResult:
        return self.inner.forward(*args)

    def backward(self, *args: Any) -> tuple[Any, ...]:
        return self.inner.backward(*args)


class Listens:
    """To every event."""

    manifest = manifest("listens")

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
    def ascend_after_evaluation(self, loss: float) -> None: ...

    @hookimpl
    def ascend_after_run(self) -> None: ...


class Waits:
    """For the other ranks, at every step."""

    manifest = manifest("waits")

    @hookimpl
    def ascend_before_step(self) -> None:
        from torch import distributed as dist

        dist.barrier()


class WritesAnEmptyFile:
    manifest = manifest("writes-an-empty-file")

    @hookimpl
    def ascend_after_log(self, context: c.RunContext) -> None:
        folder = Path(context.config.run.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "empty.txt").touch()


class ReplacesByTheSame:
    """Its patches: a function by itself, and by one that calls it."""

    manifest = manifest("replaces-by-the-same")

    @hookimpl
    def ascend_patches(self) -> Sequence[c.Patch]:
        import torch.nn.functional as F

        from ascend_run.core.patches import source_hash

        def patch(name: str, replacement: Any) -> c.Patch:
            return c.Patch(
                target=f"torch.nn.functional:{name}",
                replacement=replacement,
                why="a test",
                versions=">0",
                source_hash=source_hash(getattr(F, name)),
                until="never",
                wraps=True,
            )

        return [
            patch("silu", lambda inner: inner),
            patch("embedding", lambda inner: lambda *args, **kwargs: inner(*args, **kwargs)),
        ]


class SetsAVariable:
    manifest = manifest("sets-a-variable")

    @hookimpl
    def ascend_environment(self) -> Mapping[str, str]:
        return {"NOBODY_READS_THIS": "1"}


class SetsWhatIsSet:
    """Process settings that have their value already."""

    manifest = manifest("sets-what-is-set")

    @hookimpl
    def ascend_process_settings(self) -> Mapping[str, AbstractContextManager[Any]]:
        return {"nothing": nullcontext(), "threads": self._threads()}

    @contextmanager
    def _threads(self) -> Iterator[None]:
        import torch

        torch.set_num_threads(torch.get_num_threads())
        yield


class MakesAGroup:
    manifest = manifest("makes-a-group")

    @hookimpl
    def ascend_process_groups(self, layout: c.Layout) -> Mapping[str, Sequence[Sequence[int]]]:
        return {"unused": [[*range(layout.world_size)]]}


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


class AddsAField:
    """To the batch, which nothing reads."""

    manifest = manifest("adds-a-field")

    @hookimpl
    def ascend_batch(self) -> Callable[[Any], Any]:
        def wrap(batches: Iterator[c.Batch]) -> Iterator[c.Batch]:
            for batch in batches:
                tensors = {**batch.tensors, "unread": batch.tensors["tokens"] * 0}
                fields = {**batch.fields, "unread": batch.fields["tokens"]}
                yield attrs.evolve(batch, tensors=tensors, fields=fields)

        return wrap


class ReportsAndCosts:
    """A panel, and a cost that is not true."""

    manifest = manifest("reports-and-costs")

    @hookimpl
    def ascend_report(self) -> Sequence[c.ReportPanel]:
        return [c.ReportPanel(title="Nothing", metrics=("loss",), unit="")]

    @hookimpl
    def ascend_cost(self) -> c.CostChange:
        return c.CostChange(buffers={"none": 1.0})


class OptimizesAsAlways:
    """With the optimizer that a run has without it."""

    manifest = manifest("optimizes-as-always")

    @hookimpl
    def ascend_optimizer(self, config: Any) -> c.OptimizerSpec:
        options = config.optimizer

        def make(groups: list[dict[str, Any]]) -> Any:
            from torch.optim import AdamW

            return AdamW(
                groups,
                lr=options.lr,
                betas=(options.adam_beta1, options.adam_beta2),
                eps=options.adam_eps,
                weight_decay=options.weight_decay,
                fused=True,
            )

        moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), c.OptimizerState())
        states = {"step": c.OptimizerState(scalar=True), **moments}
        return c.OptimizerSpec(build=make, states=states, element_wise=True)


IDLE = (
    ReturnsNone,
    ReturnsWhatItWraps,
    OnlyCalls,
    ScalesByOne,
    NeverReachesItsThreshold,
    ClampsNothing,
    Reshapes,
    ChecksForNan,
    HoldsSavedTensors,
    HooksGradients,
    MatchesNoLayer,
    Delegates,
    Listens,
    Waits,
    WritesAnEmptyFile,
    ReplacesByTheSame,
    SetsAVariable,
    SetsWhatIsSet,
    MakesAGroup,
    SavesConstants,
    AddsAField,
    ReportsAndCosts,
    OptimizesAsAlways,
)


class Copies(Links):
    """As an offload does where device and host share one memory."""

    manifest = linking("copies")

    def change(self, output: Any) -> Any:
        import torch

        torch.empty_like(output).copy_(output.detach())
        return output


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
    manifest = linking("recomputes")

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
