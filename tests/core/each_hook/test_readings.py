"""Readings of plugins are logged with the kernel's, and drawn in the page of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import HookError, ReportPanel
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.plan.cost_records import StageCost, cost_of
from ascend_run.tools.plan.costs import with_costs
from ascend_run.tools.report.page import write_report
from tests.support.fake_distributions import plugin_source
from tests.support.installed import Install, offer
from tests.support.probed_runs import prepare, probe, train


def metrics_of(name: str, group: str) -> Any:
    """A plugin that reads the number of the step, times ten."""
    return probe(
        "ascend_metrics",
        lambda self, context: {group: lambda context: {"tenfold": 10.0 * context.step}},
        name,
    )


def test_ascend_metrics_are_read_once_per_logged_step_by_group_name(
    tmp_path: Path,
) -> None:
    values = {"train.train_iters": 5, "train.log_interval": 2}
    run = train(tmp_path, metrics_of("a", "mine"), metrics_of("b", "yours"), values=values)
    logged = [
        (line["step"], line["mine/tenfold"], line["yours/tenfold"]) for line in run.readings()
    ]
    assert logged == [(2, 20, 20), (4, 40, 40), (5, 50, 50)]


def test_ascend_metrics_of_one_group_by_two_plugins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HookError, match="'a' and 'b' both give 'mine'"):
        train(tmp_path, metrics_of("a", "mine"), metrics_of("b", "mine"))


DRAWN = """
    @hookimpl
    def ascend_metrics(self, context):
        return {"drawn": lambda context: {"height": 7.0}}

    @hookimpl
    def ascend_report(self):
        from ascend_run.plugin_api import ReportPanel

        return [ReportPanel(title="How high", metrics=("drawn/height",), unit="ells")]
"""


def test_ascend_report_draws_a_curve_of_a_plugins_own(install: Install, tmp_path: Path) -> None:
    offer(install, "drawn", plugin_source("drawn") + DRAWN)
    values = {"enable": ["drawn"], "train.train_iters": 2}
    assert prepare(tmp_path, values).plan.panels == (
        ReportPanel(title="How high", metrics=("drawn/height",), unit="ells"),
    )
    run = train(tmp_path, values=values)
    page = tmp_path / "report.html"
    write_report([read_run(run.folder / "run")], page)
    assert "How high" in page.read_text()
    assert "ells" in page.read_text()


def costly(name: str, factor: float) -> str:
    """A plugin that makes what the norms keep grow, and sends a kibibyte a layer."""
    return f"""
    @hookimpl
    def ascend_cost(self, rank):
        from ascend_run.plugin_api import CostChange, SavedChange, Communication

        saved = SavedChange(tensors=("input_norm.*",), factor={factor})
        sent = Communication(
            operation="all_reduce",
            group="dp",
            calls=len(rank.layers),
            sent_bytes=1024.0 * len(rank.layers),
            why="{name}",
        )
        return CostChange(saved=(saved,), communication=(sent,))
"""


def test_ascend_cost_changes_the_plain_model_plugin_after_plugin(
    install: Install, tmp_path: Path
) -> None:
    for name, factor in (("wide", 2.0), ("wider", 3.0)):
        offer(install, name, plugin_source(name) + costly(name, factor))

    def stage(*enable: str) -> StageCost:
        cost = cost_of(with_costs(prepare(tmp_path, {"enable": list(enable)})).plan)
        assert cost is not None
        (found,) = cost.stages
        return found

    plain, one, two = stage(), stage("wide"), stage("wide", "wider")
    norms = one.memory.activations - plain.memory.activations
    assert norms > 0
    assert two.memory.activations - plain.memory.activations == 5 * norms
    assert plain.changed_by == two.changed_by[2:]
    assert two.changed_by[:2] == ("wide", "wider")
    sent = {c.why: c.sent_bytes for c in two.communication if c.why.startswith("wide")}
    assert sent == dict.fromkeys(("wide", "wider"), 1024 * two.layers)
