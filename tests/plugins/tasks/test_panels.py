"""The report's panels of a task show metrics that its runs log."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugins.tasks.dpo import Dpo, DpoConfig
from ascend_run.plugins.tasks.orm import Orm, OrmConfig
from ascend_run.plugins.tasks.prm import Prm, PrmConfig
from ascend_run.plugins.tasks.simpo import Simpo, SimpoConfig


@pytest.mark.parametrize(
    "plugin",
    [
        Dpo(DpoConfig()),
        Simpo(SimpoConfig()),
        Orm(OrmConfig()),
        Prm(PrmConfig(placeholder_token="*")),
    ],
    ids=lambda plugin: plugin.manifest.name,
)
def test_panels_name_metrics_of_the_task(plugin: Any) -> None:
    metrics = plugin.ascend_task().metrics
    shown = [name for panel in plugin.ascend_report() for name in panel.metrics]
    assert shown
    assert {name.removeprefix("eval_") for name in shown} <= {*metrics}
    assert len({*shown}) == len(shown)
