"""Runs that take a second, in this process or on a rank of the pool, with probing plugins.

They are prepared as every run is; the probes, which are not installed, then join the plugins.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from ascend_run.core.config.raw import Given, RawConfig
from ascend_run.core.data.indexed import bin_path
from ascend_run.core.hooks import Hooks
from ascend_run.core.launch.rank_environment import RankEnvironment
from ascend_run.entrypoints.planning import Prepared, prepare_raw
from ascend_run.plugin_api import RunContext
from ascend_run.plugin_api.testing.models import MODELS

from .fake_plugins import plugin
from .tokens import write_tokens

# Megatron tells, once, when first imported, of each optional library that it does without.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ascend_run.core.run import (
        RunRequest,
        prepared_rank,
        run_training,
        seed_everything,
    )
    from ascend_run.core.train.rehearsal import Rehearsal

VALUES: Mapping[str, Any] = {
    "train.train_iters": 1,
    "train.global_batch_size": 1,
    "optimizer.lr_warmup_iters": 0,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_grad": 0.0,
    "optimizer.adam_eps": 1e-8,
}
"""On top of the conformance kit's model: one step of one sequence, and nothing but the gradient
moves a weight."""

Values = Mapping[str, Any]


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Megatron's own, of what it does itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.")
        yield


def prepare(folder: Path, values: Values | None = None, model: str = "dense") -> Prepared:
    """A run on as many ranks as this process is one of, in a folder with its data."""
    chosen = {
        **MODELS[model],
        **VALUES,
        "data.train": [str(folder / "tokens")],
        "run.output_dir": str(folder / "run"),
        **(values or {}),
    }
    raw = RawConfig(values={name: Given(value, "the test") for name, value in chosen.items()})
    return prepare_raw(raw, world_size=RankEnvironment.of_this_process().world_size)


def request(prepared: Prepared, *probes: Any) -> RunRequest:
    """What training is asked; the probes come before the run's own plugins, so further in."""
    asked = prepared.run_request()
    return attrs.evolve(asked, plugins=[*probes, *asked.plugins])


@contextmanager
def built(
    folder: Path, *probes: Any, values: Values | None = None, model: str = "dense"
) -> Iterator[tuple[Hooks, RunContext]]:
    """Models built and nothing trained; no data is needed."""
    with built_from(request(prepare(folder, values, model), *probes)) as (hooks, context):
        yield hooks, context


@contextmanager
def built_from(asked: RunRequest) -> Iterator[tuple[Hooks, RunContext]]:
    """The same from a request, which may be for what no installed plugin would allow."""
    with _without_deprecations(), prepared_rank(asked) as (hooks, context):
        seed_everything(context.config, context.layout)
        Rehearsal(hooks, context).build()
        yield hooks, context


@attrs.frozen
class Run:
    """What is left of a run that has ended."""

    folder: Path
    context: RunContext

    @property
    def model(self) -> Any:
        """The model, inside its gradient reduction."""
        return self.context.models["policy"].chunks[0].module

    @property
    def weights(self) -> dict[str, Any]:
        """Name -> weight, detached."""
        return {name: weight.detach() for name, weight in self.model.named_parameters()}

    def lines(self) -> list[dict[str, Any]]:
        """``metrics.jsonl``."""
        text = (self.folder / "run/metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def readings(self) -> list[dict[str, Any]]:
        """The logged steps."""
        return [line for line in self.lines() if "loss" in line]


def train(folder: Path, *probes: Any, values: Values | None = None, model: str = "dense") -> Run:
    """A whole run."""
    seen: list[RunContext] = []
    witness = probe("ascend_before_run", lambda self, context: seen.append(context), "witness")
    if not bin_path(folder / "tokens").exists():
        write_tokens(folder)
    with _without_deprecations():
        run_training(request(prepare(folder, values, model), *probes, witness))
    return Run(folder, seen[0])


def probe(hook: str, function: Callable[..., Any], name: str = "probe") -> Any:
    """An instance of a plugin with one hook: ``function(self, ...)``."""
    return plugin(name, {hook: function})()
