"""The plan's page in a real browser: everything drawn, no error, no request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_run.entrypoints.cli import run
from tests.support.demo import DEMO, NEEDS_ITS_FEATURES
from tests.tools.plan.test_command import LARGE

from .page import Browser, Page, View
from .test_in_browser import quiet

OpenPlan = Callable[..., Page]

pytestmark = NEEDS_ITS_FEATURES
pytestmark = pytest.mark.needs_plugins("gmm", "mixtral", "swap-attention", "ulysses")
"""Of the demo."""


@pytest.fixture
def open_plan(browser: Browser, tmp_path: Path) -> OpenPlan:
    """Write the plan's page of a command line (default: the demo's) and open it."""

    def opened(*words: str, **options: object) -> Page:
        target = tmp_path / "report.html"
        words = words or ("--config", str(DEMO))
        assert run(["plan", *words, "--html", str(target)]) == 0
        return browser.open(target, View(**options))  # type: ignore[arg-type]

    return opened


def texts(page: Page, selector: str) -> list[str]:
    return page.evaluate(
        f"[...document.querySelectorAll({selector!r})].map(e => e.textContent.trim())"
    )


def test_the_demo_s_plan_is_drawn(open_plan: OpenPlan) -> None:
    page = open_plan()
    quiet(page)
    assert texts(page, "h2") == [
        *("Plugins and hooks", "Ranks", "Estimated cost", "Configuration"),
    ]
    assert texts(page, "h1") == ["demo.toml"]
    assert "1ulysses" in texts(page, ".drawing .box.wrapper > .label")
    assert texts(page, "[data-rank] b") == ["0", "1"]
    assert {"cp", "dp_cp"} <= {t.split(",")[0] for t in texts(page, "#cost svg text")}
    assert page.evaluate("document.querySelectorAll('table.config tbody tr').length") > 250
    origins = texts(page, "table.config td:last-child")
    assert "demo.toml:9" in origins
    assert "Megatron's default" in origins


def test_bars_are_as_long_as_what_they_stand_for(open_plan: OpenPlan) -> None:
    page = open_plan()
    bars = page.evaluate(
        "[...document.querySelector('#cost svg').querySelectorAll('rect')].map(r =>"
        " [r.querySelector('title').textContent, r.getBBox().width, r.getBBox().x])"
    )
    widths = {told.split(":")[0]: width for told, width, _ in bars}
    # The optimizer's state is fp32 weights and two moments; the weights are bf16.
    assert widths["optimizer"] / widths["weights"] == pytest.approx(6, rel=0.01)
    ends = [x + width for _, width, x in bars]
    assert [x for _, _, x in bars[1:]] == pytest.approx(ends[:-1], abs=0.1)


def test_thousands_of_ranks_are_drawn_in_blocks(open_plan: OpenPlan) -> None:
    page = open_plan(*LARGE)
    quiet(page)
    assert page.evaluate("document.querySelectorAll('svg.blocks').length") == 4
    assert page.evaluate("document.querySelectorAll('svg.blocks rect').length") == 4 * 249
    told = texts(page, "svg.blocks rect title")
    assert told[0] == "pp 0, dp 0: ranks 0 to 7"
    assert told[-1] == "pp 3, dp 248: ranks 7,960 to 7,967"
    assert len(page.evaluate("document.documentElement.outerHTML")) < 400_000


@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(open_plan: OpenPlan, width: int, scheme: str) -> None:
    page = open_plan(*LARGE, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        "[...document.querySelectorAll('#cost svg text')].filter(t => {"
        "const b = t.getBBox(); return b.x < 0 || b.x + b.width > 1000; }).length"
    )
    assert outside == 0
    quiet(page)


@pytest.mark.needs_plugins("ring-attention")
def test_a_level_is_shown(open_plan: OpenPlan) -> None:
    page = open_plan("--config", str(DEMO), "--level", "2")
    (level,) = texts(page, "#level")
    assert "leaves out ring-attention" in level
    quiet(page)


def test_names_cannot_become_markup(open_plan: OpenPlan, tmp_path: Path) -> None:
    file = tmp_path / "<img src=x onerror=alert(1)>.toml"
    file.write_text(DEMO.read_text())
    page = open_plan("--config", str(file))
    quiet(page)
    assert page.evaluate("document.querySelectorAll('img').length") == 0


def test_a_page_that_cannot_be_written_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "none/plan.html"
    assert run(["plan", "--config", str(DEMO), "--html", str(target)]) == 2
    assert "choose another file with --html" in capsys.readouterr().err
