"""The report's panels of a task show metrics that its runs log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugins.tasks.dpo import Dpo, DpoConfig
from ascend_run.plugins.tasks.orm import Orm, OrmConfig
from ascend_run.plugins.tasks.prm import Prm, PrmConfig
from ascend_run.plugins.tasks.simpo import Simpo, SimpoConfig
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.report.charts import charts_of
from tests.support.family_tasks import write_samples
from tests.support.first_steps import step_values
from tests.support.probed_runs import train

PLUGINS: Mapping[str, Any] = {
    "dpo": Dpo(DpoConfig()),
    "simpo": Simpo(SimpoConfig()),
    "orm": Orm(OrmConfig()),
    "prm": Prm(PrmConfig(placeholder_token="*")),
}


@pytest.mark.parametrize("task", PLUGINS)
def test_panels_name_metrics_of_the_task(task: str) -> None:
    plugin = PLUGINS[task]
    metrics = plugin.ascend_task().metrics
    shown = [name for panel in plugin.ascend_report() for name in panel.metrics]
    assert shown
    assert {name.removeprefix("eval_") for name in shown} <= {*metrics}
    assert len({*shown}) == len(shown)


@pytest.mark.parametrize("task", PLUGINS)
def test_charts_have_the_values_that_a_run_has_logged(tmp_path: Path, task: str) -> None:
    values = step_values(task, write_samples(tmp_path), packing=True)
    held_out = {"data.validation": values["data.train"], "train.eval_interval": 1}
    steps = {"train.train_iters": 2, "train.eval_iters": 1, "train.log_interval": 1}
    run = train(tmp_path, values={**values, **held_out, **steps})
    read = read_run(run.folder / "run")
    found = [chart for chart in charts_of([read]) if chart.panel]
    panels = [panel for panel in PLUGINS[task].ascend_report() if panel.metrics]
    assert [chart.curve.title for chart in found] == [panel.title for panel in panels]
    for chart, panel in zip(found, panels, strict=True):
        assert [line.metric for line in chart.lines] == [*panel.metrics]
        for line in chart.lines:
            logged = {at["step"]: at[line.metric] for at in run.lines() if line.metric in at}
            assert dict(zip(line.series.steps, line.series.values, strict=True)) == logged
            assert len(logged) == (3 if line.metric.startswith("eval_") else 2)
