"""The top of the page: name, status and key figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ascend_run.core.log.progress import duration
from ascend_run.tools.pages.markup import Markup, element, join, table
from ascend_run.tools.pages.run_folder import RunData

from .summary import Summary, describe_model

_STATUS_TITLE: Final = {
    "finished": "the run is complete",
    "failed": "the run ended with an error",
    "unfinished": "running when this page was written, or interrupted",
}


def headline(run: RunData, summary: Summary) -> Markup:
    """Name, status, loss and figures of one run."""
    status = element(
        "span",
        summary.status,
        class_=f"status {summary.status}",
        title=_STATUS_TITLE[summary.status],
    )
    figures = [
        element("div", element("dt", name), element("dd", *value))
        for name, value in _figures(run, summary)
    ]
    return join(
        [
            element("h1", run.name, " ", status),
            element("p", " \N{MIDDLE DOT} ".join(describe_model(run.config)), class_="lead"),
            element("p", summary.message, class_="failure") if summary.message else None,
            element("dl", *figures, class_="figures"),
            _versions(run),
        ]
    )


def comparison(runs: Sequence[RunData], summaries: Sequence[Summary]) -> Markup:
    """Return a table with the figures of several runs, one row per run."""
    rows = []
    for run, summary in zip(runs, summaries, strict=True):
        loss = summary.loss
        rows.append(
            [
                run.name,
                summary.status,
                f"{loss.name} {loss.start:.4f} \N{RIGHTWARDS ARROW} {loss.end:.4f}" if loss else "",
                _steps(summary),
                _count(summary.tokens_per_second),
                duration(summary.seconds) if summary.seconds is not None else "",
                memory(summary.peak_memory_bytes),
            ]
        )
    head = ("run", "status", "loss", "steps", "tokens/s, median", "duration", "peak memory")
    title = element("h1", " \N{MIDDLE DOT} ".join(run.name for run in runs))
    return join([title, table(head, rows, class_="comparison")])


def memory(size: float | None) -> str:
    """Format bytes in binary units: ``1.25 GiB``."""
    if size is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _figures(run: RunData, summary: Summary) -> list[tuple[str, list[str | None]]]:
    figures: list[tuple[str, list[str | None]]] = []
    if (loss := summary.loss) is not None:
        share = element("small", f"{loss.percent:.1f} % of the start")
        change = element("strong", f"{loss.start:.4f} \N{RIGHTWARDS ARROW} {loss.end:.4f}")
        figures.append((f"{loss.name} loss".capitalize(), [change, share]))
    if summary.tokens_per_second is not None:
        unit = element("small", "tokens/s, median")
        figures.append(("Throughput", [_count(summary.tokens_per_second), unit]))
    if summary.seconds is not None:
        attempts = f"{summary.attempts} attempts" if summary.attempts > 1 else "h:mm:ss"
        figures.append(("Duration", [duration(summary.seconds), element("small", attempts)]))
    if summary.last_step is not None:
        trained = f"{_count(summary.tokens)} tokens" if summary.tokens is not None else None
        small = element("small", trained) if trained else None
        figures.append(("Steps", [_steps(summary), small]))
    if summary.peak_memory_bytes is not None:
        rank = element("small", "on rank 0")
        figures.append(("Peak memory", [memory(summary.peak_memory_bytes), rank]))
    if run.fingerprint is not None:
        code = element("code", run.fingerprint.fingerprint)
        small = element("small", f"of step {run.fingerprint.step:,}")
        figures.append(("Fingerprint", [code, small]))
    if device := _device(run):
        figures.append(("Device", [device, element("small", _world(run))]))
    return figures


def _versions(run: RunData) -> Markup | None:
    versions = run.plan.versions
    if not versions:
        return None
    parts = [f"{name} {version}" for name, version in versions.items()]
    return element("p", " \N{MIDDLE DOT} ".join(parts), class_="versions")


def _device(run: RunData) -> str:
    return run.plan.device or run.config.platform or ""


def _world(run: RunData) -> str | None:
    world = run.plan.layout.world_size
    return None if world is None else f"{world} {'rank' if world == 1 else 'ranks'}"


def _steps(summary: Summary) -> str:
    if summary.last_step is None:
        return ""
    total = f" of {summary.total_steps:,}" if summary.total_steps is not None else ""
    return f"{summary.last_step:,}{total}"


def _count(value: float | None) -> str:
    """``12,345``, ``1.02 M``."""
    if value is None:
        return ""
    if value < 100_000:
        return f"{value:,.0f}"
    for unit in ("k", "M", "G"):
        value /= 1000
        if value < 1000:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:.3g} T"
