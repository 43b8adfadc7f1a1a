"""Runs of about a second, in this process or on a rank of the pool, with probe plugins.

They are prepared like any run; the probes, which are not installed, are added afterwards.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from ascend_run.core.hooks import Hooks
from ascend_run.core.rank.rank_environment import RankEnvironment
from ascend_run.plugin_api import LinkPlace, RunContext
from ascend_run.prepare.config.raw import RawConfig, RawValue
from ascend_run.prepare.prepare import PreparedRun, prepare_raw
from ascend_run.testing.models import MODELS
from ascend_run.text.dataset_paths import bin_path

from .fake_plugins import plugin
from .tokens import write_tokens

# Megatron warns of each missing optional library when first imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ascend_run.core.run import (
        RunRequest,
        prepared_rank,
        run_training,
        seed_everything,
    )
    from ascend_run.testing.dry_run import DryRun

VALUES: Mapping[str, Any] = {
    "train.train_iters": 1,
    "train.global_batch_size": 1,
    "optimizer.lr_warmup_iters": 0,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_grad": 0.0,
    "optimizer.adam_eps": 1e-8,
}
"""Added to the conformance kit's model: one step of one sequence, without weight decay."""

Values = Mapping[str, Any]


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Ignore Megatron's own deprecation warnings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.")
        yield


def prepare(folder: Path, values: Values | None = None, model: str = "dense") -> PreparedRun:
    """Prepare a run on as many ranks as this process belongs to, in a folder with its data."""
    chosen = {
        **MODELS[model],
        **VALUES,
        "data.train": [str(folder / "tokens")],
        "run.output_dir": str(folder / "run"),
        **(values or {}),
    }
    raw = RawConfig(values={name: RawValue(value, "the test") for name, value in chosen.items()})
    return prepare_raw(raw, world_size=RankEnvironment.of_this_process().world_size)


def request(prepared: PreparedRun, *probes: Any) -> RunRequest:
    """Return the training request; the probes precede the run's plugins, so they are innermost."""
    asked = prepared.run_request()
    return attrs.evolve(asked, plugins=[*probes, *asked.plugins])


@contextmanager
def built(
    folder: Path, *probes: Any, values: Values | None = None, model: str = "dense"
) -> Iterator[tuple[Hooks, RunContext]]:
    """Yield models without training; needs no data."""
    with built_from(request(prepare(folder, values, model), *probes)) as (hooks, context):
        yield hooks, context


@contextmanager
def built_from(asked: RunRequest) -> Iterator[tuple[Hooks, RunContext]]:
    """Yield the same from a request, which may be one that installed plugins would reject."""
    with _without_deprecations(), prepared_rank(asked) as (hooks, context):
        seed_everything(context.config, context.layout)
        DryRun(hooks, context).build()
        yield hooks, context


@attrs.frozen
class Run:
    """Results of a finished run."""

    folder: Path
    context: RunContext

    @property
    def model(self) -> Any:
        """The model, inside its DDP wrapper."""
        return self.context.models["policy"].chunks[0].module

    @property
    def weights(self) -> dict[str, Any]:
        """Name -> weight, detached."""
        return {name: weight.detach() for name, weight in self.model.named_parameters()}

    def lines(self) -> list[dict[str, Any]]:
        """Lines of ``metrics.jsonl``."""
        text = (self.folder / "run/metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def readings(self) -> list[dict[str, Any]]:
        """The logged steps."""
        return [line for line in self.lines() if "loss" in line]


def train(folder: Path, *probes: Any, values: Values | None = None, model: str = "dense") -> Run:
    """Run training to its end."""
    seen: list[RunContext] = []
    witness = probe("ascend_before_run", lambda self, context: seen.append(context), "witness")
    if not bin_path(folder / "tokens").exists():
        write_tokens(folder)
    with _without_deprecations():
        run_training(request(prepare(folder, values, model), *probes, witness))
    return Run(folder, seen[0])


def probe(hook: str, function: Callable[..., Any], name: str = "probe") -> Any:
    """Create a plugin instance with one hook, ``function(self, ...)``; a module hook may link the
    module's forward."""
    links = {hook.removeprefix("ascend_"): LinkPlace.AROUND}
    return plugin(name, {hook: function}, forward_links=links)()
