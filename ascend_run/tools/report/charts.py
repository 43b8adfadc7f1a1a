"""The charts of the page, as data for its script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from ascend_run.core.log.json_values import number
from ascend_run.tools.pages.run_folder import RunData
from ascend_run.tools.pages.step_metrics import StepMetrics

from .series import LayerLoads, LoadMap, Series, layer_loads, load_map, series_of


@attrs.frozen(kw_only=True)
class Curve:
    """One chart: metrics that share an axis."""

    id: str
    title: str
    metrics: tuple[tuple[str, str], ...]
    """Name in the metrics log, and label in the legend."""
    unit: str = ""
    from_zero: bool = False
    noisy: bool = True
    """Whether the curve is smoothed; not useful for schedules."""
    main: bool = False
    """Whether it is drawn first and large."""
    now_and_then: bool = False
    """Whether its values are those of some checkpoints, by ``ascend-run evaluate``."""


STANDARD: Final = (
    Curve(
        id="loss",
        title="Loss",
        metrics=(("loss", "training"), ("eval_loss", "held-out")),
        unit="nats per token",
        main=True,
    ),
    Curve(
        id="lr",
        title="Learning rate",
        metrics=(("lr", "learning rate"),),
        from_zero=True,
        noisy=False,
    ),
    Curve(id="grad_norm", title="Gradient norm", metrics=(("grad_norm", "norm"),), from_zero=True),
    Curve(
        id="throughput",
        title="Throughput",
        metrics=(("tokens_per_second", "all ranks"),),
        unit="tokens/s",
        from_zero=True,
    ),
    Curve(
        id="memory",
        title="Memory of rank 0",
        metrics=(("memory_bytes", "in use"), ("memory_peak_bytes", "peak")),
        unit="bytes",
        from_zero=True,
        noisy=False,
    ),
    Curve(
        id="step_time",
        title="Time per step",
        metrics=(("step_seconds", "step"),),
        unit="s",
        from_zero=True,
    ),
    Curve(id="aux_loss", title="Auxiliary loss", metrics=(("aux_loss", "load balance"),)),
    Curve(id="loss_scale", title="Loss scale", metrics=(("loss_scale", "scale"),), noisy=False),
)
_NO_CURVE: Final = frozenset(
    {"step", "time", "consumed_samples", "expert_load", "expert_load_by_layer", "skipped"}
)
_MEASURED_NOW_AND_THEN: Final = frozenset({"eval_loss"})


@attrs.frozen(kw_only=True)
class Line:
    """One curve of a chart."""

    run: int
    label: str
    metric: str
    series: Series


@attrs.frozen(kw_only=True)
class Chart:
    """A chart and its lines."""

    curve: Curve
    lines: tuple[Line, ...]
    panel: bool = False
    """Whether a plugin added it."""

    @property
    def note(self) -> str:
        """Explain how values are reduced to points."""
        notes = []
        most = max((line.series for line in self.lines), key=lambda series: series.readings)
        if most.readings_per_point > 1:
            notes.append(
                f"{most.readings:,} values drawn as {len(most.steps):,} points: each is the mean "
                f"of {most.readings_per_point}, the band their range."
            )
        if any(line.series.not_finite for line in self.lines):
            notes.append("A cross marks a step whose value is NaN or infinite.")
        return " ".join(notes)


@attrs.frozen(kw_only=True)
class Heat:
    """Expert load of one run."""

    run: int
    name: str
    load: LoadMap
    layers: LayerLoads | None
    """The load of each layer, if it was logged."""


def charts_of(runs: Sequence[RunData]) -> list[Chart]:
    """Return every chart that at least one run has values for."""
    curves = [(curve, False) for curve in STANDARD]
    curves += [(curve, True) for curve in _panels(runs)]
    taken = {metric for curve, _ in curves for metric, _ in curve.metrics} | _NO_CURVE
    others = sorted(_scalar_metrics(runs) - taken)
    curves += [
        (Curve(id=f"other-{i}", title=m, metrics=((m, m),)), False) for i, m in enumerate(others)
    ]
    curves += [
        (Curve(id=f"evaluated-{i}", title=m, metrics=((m, m),), now_and_then=True), False)
        for i, m in enumerate(
            sorted({m for run in runs for e in run.evaluations for m in e.values})
        )
    ]
    charts = []
    for curve, panel in curves:
        lines = tuple(
            Line(run=i, label=label, metric=metric, series=series)
            for i, run in enumerate(runs)
            for metric, label in curve.metrics
            if (series := series_of(_read(run, curve), metric)).steps
        )
        if lines:
            charts.append(Chart(curve=curve, lines=lines, panel=panel))
    return charts


def _read(run: RunData, curve: Curve) -> Sequence[StepMetrics]:
    return run.evaluations if curve.now_and_then else run.steps


def heats_of(runs: Sequence[RunData]) -> list[Heat]:
    """Return the expert load of every run with experts."""
    loads = [(i, run, load_map(run.steps)) for i, run in enumerate(runs)]
    return [
        Heat(run=i, name=run.name, load=load, layers=layer_loads(run.steps))
        for i, run, load in loads
        if load is not None
    ]


def payload(runs: Sequence[RunData], charts: Sequence[Chart], heats: Sequence[Heat]) -> Any:
    """Return the charts as JSON values, for the scripts in ``assets``."""
    return {
        "runs": [run.name for run in runs],
        "marks": [mark for i, run in enumerate(runs) for mark in _marks(i, run)],
        "charts": {chart.curve.id: _chart(chart, len(runs)) for chart in charts},
        "heats": {f"load-{heat.run}": _heat(heat) for heat in heats},
        "layers": {
            f"load-{heat.run}": _layers(heat.layers) for heat in heats if heat.layers is not None
        },
    }


def _panels(runs: Sequence[RunData]) -> list[Curve]:
    """Panels that plugins add, from the plans of the runs."""
    panels: dict[str, Curve] = {}
    for run in runs:
        for i, panel in enumerate(run.plan.panels):
            if panel.areas is not None or panel.table is not None:
                continue
            title = panel.title or ", ".join(panel.metrics)
            panels.setdefault(
                title,
                Curve(
                    id=f"panel-{len(panels)}-{i}",
                    title=title,
                    metrics=tuple((name, name) for name in panel.metrics),
                    unit=panel.unit,
                ),
            )
    return list(panels.values())


def _scalar_metrics(runs: Sequence[RunData]) -> set[str]:
    return {
        name
        for run in runs
        for one in run.steps
        for name, value in one.values.items()
        if not isinstance(value, bool) and number(value) is not None
    }


def _marks(index: int, run: RunData) -> list[object]:
    """Steps to mark in every chart: where the run was resumed."""
    return [
        {"run": index, "step": event.step, "label": "resumed"}
        for event in run.events
        if event.event == "resume" and event.step is not None
    ]


def _chart(chart: Chart, runs: int) -> Any:
    single_curve = len(chart.curve.metrics) == 1
    return {
        "title": chart.curve.title,
        "unit": chart.curve.unit,
        "fromZero": chart.curve.from_zero,
        "noisy": chart.curve.noisy,
        "single": single_curve,
        "lines": [
            {
                "run": line.run,
                "label": line.label,
                "colour": line.run if runs > 1 else _place(chart.curve, line.metric),
                "dashed": runs > 1
                and not single_curve
                and line.metric != chart.curve.metrics[0][0],
                "dots": chart.curve.now_and_then or line.metric in _MEASURED_NOW_AND_THEN,
                **_points(line.series),
            }
            for line in chart.lines
        ],
    }


def _place(curve: Curve, metric: str) -> int:
    return [name for name, _ in curve.metrics].index(metric)


def _points(series: Series) -> Any:
    return {
        "x": series.steps,
        "y": [_rounded(v) for v in series.values],
        "low": [_rounded(v) for v in series.low],
        "high": [_rounded(v) for v in series.high],
        "notFinite": series.not_finite,
        "perPoint": series.readings_per_point,
    }


def _heat(heat: Heat) -> Any:
    return {
        "edges": heat.load.edges,
        "shares": [[_rounded(share) for share in column] for column in heat.load.shares],
        "perColumn": heat.load.readings_per_column,
    }


def _layers(loads: LayerLoads) -> Any:
    return {
        "edges": loads.edges,
        "layers": loads.layers,
        "shares": [
            [[float(f"{share:.3g}") for share in layer] for layer in period]
            for period in loads.shares
        ],
    }


def _rounded(value: float | None) -> float | None:
    """Round to seven digits, float32 precision, which saves two thirds of the bytes."""
    return None if value is None else float(f"{value:.7g}")
