"""The key figures of a run."""

from __future__ import annotations

import math
import statistics
from datetime import UTC, datetime

import attrs

from ascend_run.tools.pages.run_folder import RunData
from ascend_run.tools.pages.run_records import RecordedConfig, RunEvent

from .blend import BlendedDataset, blend_of


@attrs.frozen(kw_only=True)
class LossChange:
    """A loss at the start and at the end."""

    name: str
    """``held-out``, or ``training`` if there was no evaluation."""
    start: float
    end: float

    @property
    def percent(self) -> float:
        """The final loss in percent of the initial one."""
        return 100.0 * self.end / self.start if self.start else math.nan


@attrs.frozen(kw_only=True)
class Summary:
    """Key figures; None if the run folder does not have them."""

    status: str
    """``finished``, ``failed`` or ``unfinished`` (running, or killed)."""
    message: str = ""
    """Why it failed."""
    loss: LossChange | None = None
    last_step: int | None = None
    total_steps: int | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    """Median over the logged steps."""
    seconds: float | None = None
    """Duration of all attempts, including steps that were lost."""
    attempts: int = 0
    peak_memory_bytes: float | None = None
    last_written: str = ""
    """Time of the last logged step, ISO 8601 in UTC."""
    blend: tuple[BlendedDataset, ...] = ()
    """The training datasets, if there are several with weights."""


def summarize(run: RunData) -> Summary:
    """Compute the key figures of one run."""
    seq_length = run.config.data.seq_length
    samples = _numbers(run, "consumed_samples")
    peaks = _numbers(run, "memory_peak_bytes") or _numbers(run, "memory_bytes")
    rates = _numbers(run, "tokens_per_second")
    last_step = run.steps[-1].step if run.steps else None
    status, message = _status(run)
    return Summary(
        status=status,
        message=message,
        loss=_loss_change(run),
        last_step=last_step,
        total_steps=run.config.train.train_iters,
        tokens=int(samples[-1] * seq_length) if samples and seq_length is not None else None,
        tokens_per_second=statistics.median(rates) if rates else None,
        seconds=_seconds(run),
        attempts=len(run.metrics.attempts),
        peak_memory_bytes=max(peaks, default=None),
        last_written=_last_written(run),
        blend=blend_of(run, int(samples[-1]) if samples else None),
    )


def _numbers(run: RunData, metric: str) -> list[float]:
    values = (one.number(metric) for one in run.steps)
    return [value for value in values if value is not None and math.isfinite(value)]


def _loss_change(run: RunData) -> LossChange | None:
    for name, metric in (("held-out", "eval_loss"), ("training", "loss")):
        values = _numbers(run, metric)
        if len(values) > 1:
            return LossChange(name=name, start=values[0], end=values[-1])
    return None


def _status(run: RunData) -> tuple[str, str]:
    last = run.events[-1] if run.events else RunEvent()
    if last.event == "finish":
        return "finished", ""
    if last.event == "failure":
        return "failed", last.error
    return "unfinished", ""


def _seconds(run: RunData) -> float | None:
    attempts = run.metrics.attempts
    seconds = sum(last - first for first, last in attempts)
    return seconds if attempts and math.isfinite(seconds) else None


def _last_written(run: RunData) -> str:
    moments = [last for _, last in run.metrics.attempts]
    try:
        return utc(moments[-1]) if moments else ""
    except (OverflowError, OSError, ValueError):
        return ""  # outside the range of datetime


def utc(moment: float) -> str:
    """Format a Unix time as ``2026-01-31 17:05 UTC``."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


def describe_model(config: RecordedConfig) -> list[str]:
    """Return short descriptions of the model: family, layers, widths, experts."""
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    experts, chosen = model.num_moe_experts, model.moe_router_topk
    words = [
        model.family or None,
        f"{model.num_layers} layers" if model.num_layers else None,
        f"hidden size {model.hidden_size}" if model.hidden_size else None,
        f"{heads} heads" + (f", {groups} key-value" if groups else "") if heads else None,
        f"{experts} experts" + (f", top {chosen}" if chosen else "") if experts else None,
        config.train.precision or None,
    ]
    return [word for word in words if word is not None]
