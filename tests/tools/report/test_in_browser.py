"""The page in a real browser: curves drawn, controls at work, no error and no request."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import pytest

from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.report.page import write_report

from .page import Browser, Page, View
from .run_folders import metrics_lines, write_run
from .test_page import hostile_run

OpenRun = Callable[..., Page]
IMAGE = "https://ascend-run.invalid/x.png"
"""A file would do in Chromium; Firefox lets a page that is a file load others."""


@pytest.fixture
def open_run(browser: Browser, tmp_path: Path) -> OpenRun:
    """Write the report of run folders (default: the demo's) and open it."""

    def opened(*folders: Path, **options: object) -> Page:
        folders = folders or (write_run(tmp_path / "demo"),)
        target = tmp_path / "report.html"
        write_report([read_run(folder) for folder in folders], target)
        return browser.open(target, View(**options))  # type: ignore[arg-type]

    return opened


def quiet(page: Page) -> None:
    """No script error, no refusal of the content policy, and no request but for the page."""
    assert page.errors() == []
    (only,) = page.requests()
    assert only.startswith("file://")
    assert only.endswith("/report.html")


def centre(page: Page, selector: str) -> tuple[float, float, float, float]:
    """Left, top, width and height of the first match, scrolled into view."""
    box = page.evaluate(
        f"(() => {{ const e = document.querySelector({selector!r});"
        "e.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    return tuple(box)


def test_every_curve_is_drawn_with_its_points(open_run: OpenRun) -> None:
    page = open_run()
    quiet(page)
    drawn = page.evaluate(
        "[...document.querySelectorAll('[data-chart]')].map(host => [host.dataset.chart,"
        " [...host.querySelectorAll('path.curve')]"
        ".map(p => p.getAttribute('d').split(/[ML]/).length - 1),"
        " [...host.querySelectorAll('path.curve')].every(p => p.getTotalLength() > 100)])"
    )
    assert {name: points for name, points, _ in drawn} == {
        "loss": [400, 9],
        "lr": [400],
        "grad_norm": [400],
        "throughput": [400],
        "memory": [400, 400],
        "step_time": [400],
        "aux_loss": [400],
        "panel-0-0": [400],
    }
    assert all(long for _, _, long in drawn)


BORDERS = (-1.5, -1.0, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1.0, 1.5)
"""Of the classes of loads, in powers of two around the balanced share."""


def cells(page: Page, plot: str) -> list[list[int]]:
    """Return the class of each cell of a map, row by row; they fill a grid of equal columns."""
    paths = page.evaluate(
        f"[...document.querySelectorAll('{plot} path')]"
        ".map(p => [p.getAttribute('class'), p.getAttribute('d')])"
    )
    found = {
        (float(top), float(left)): int(name.removeprefix("load"))
        for name, d in paths
        for left, top in re.findall(r"M(\S+) (\S+?)h", d)
    }
    assert len(found) == sum(d.count("M") for _, d in paths), "no cell is drawn twice"
    tops, lefts = (sorted({place[axis] for place in found}) for axis in (0, 1))
    widths = [after - before for before, after in pairwise(lefts)]
    assert max(widths) - min(widths) <= 0.2, widths  # positions have one decimal
    return [[found[top, left] for left in lefts] for top in tops]


def load_class(relative: float) -> int:
    return sum(relative >= 2**border for border in BORDERS)


def test_cells_of_both_maps_are_the_logged_loads(open_run: OpenRun, tmp_path: Path) -> None:
    """Rows of the first are experts and its columns steps; of the second, layers and experts at the
    last step."""
    loads = [
        [0.1, 0.2, 0.3, 0.4],
        [0.25, 0.25, 0.25, 0.25],
        [0.7, 0.1, 0.11, 0.09],
        [0.02, 0.08, 0.0, 0.9],
    ]
    by_layer = [[], [0.3, 0.15, 0.15, 0.4], [0.02, 0.48, 0.45, 0.05]]
    lines = [
        {
            "step": step,
            "loss": 1.0,
            "expert_load": load,
            "expert_load_by_layer": by_layer if step == 4 else [[], load, load],
        }
        for step, load in enumerate(loads, 1)
    ]
    page = open_run(write_run(tmp_path / "maps", lines=lines))
    drawn = cells(page, "[data-heat]")
    assert drawn == [[load_class(4 * load[expert]) for load in loads] for expert in range(4)]
    assert {*chain(*drawn)} == {0, 1, 3, 5, 6, 8, 9, 10}
    layers = cells(page, "[data-layers]")
    assert layers == [[load_class(4 * share) for share in layer] for layer in by_layer[1:]]


def test_the_load_of_layers_is_that_at_the_cursor(open_run: OpenRun, tmp_path: Path) -> None:
    lines = [
        {
            "step": step,
            "loss": 1.0,
            "expert_load": [0.5, 0.5],
            "expert_load_by_layer": [[], [0.5, 0.5], [step / 10, 1 - step / 10]],
        }
        for step in range(1, 10)
    ]
    page = open_run(write_run(tmp_path / "layers", lines=lines))
    reading = "document.querySelector('[data-layers] .legend').innerText"
    assert page.evaluate(reading) == "step 9: expert 0 of layer 2 at 1.8 times its balanced share"
    page.evaluate("document.querySelector('[data-heat] svg').focus()")
    page.key("Home")
    page.key("ArrowRight")
    assert page.evaluate(reading) == "step 2: expert 1 of layer 2 at 1.6 times its balanced share"
    quiet(page)


def test_the_curve_passes_through_the_values(open_run: OpenRun, tmp_path: Path) -> None:
    lines = [{"step": step, "loss": loss} for step, loss in ((0, 4.0), (4, 1.0), (10, 3.0))]
    page = open_run(write_run(tmp_path / "three", lines=lines))
    page.evaluate(
        "(() => { const s = document.getElementById('smoothing'); s.value = 0;"
        "s.dispatchEvent(new Event('input')); })()"
    )
    path = page.evaluate("document.querySelector('[data-chart=loss] path.curve').getAttribute('d')")
    (x0, y0), (x1, y1), (x2, y2) = [
        tuple(map(float, point.split())) for point in path.removeprefix("M").split("L")
    ]
    assert (x1 - x0) / (x2 - x0) == pytest.approx(0.4, abs=0.001)
    assert x2 - x0 > 1000, "the curve fills the width of the plot"
    assert (y2 - y0) / (y1 - y0) == pytest.approx(1 / 3, abs=0.01), "4 down to 3 of 4 down to 1"


def test_a_reading_that_is_not_finite_is_a_gap_with_a_cross(
    open_run: OpenRun, tmp_path: Path
) -> None:
    values = [3.0, 2.5, "NaN", 2.2, 2.0]
    lines = [{"step": step, "loss": value} for step, value in enumerate(values)]
    page = open_run(write_run(tmp_path / "gap", lines=lines))
    path = page.evaluate("document.querySelector('[data-chart=loss] path.curve').getAttribute('d')")
    assert [part.count("L") for part in path.split("M")[1:]] == [1, 1]
    crosses = "[...document.querySelectorAll('.not-finite title')].map(t => t.textContent)"
    assert page.evaluate(crosses) == ["step 2: training is nan"]


def test_the_pointer_shows_the_values_of_its_step_in_every_chart(open_run: OpenRun) -> None:
    page = open_run()
    left, top, width, height = centre(page, "[data-chart=loss] svg")
    page.mouse("move", left + width / 2, top + height / 2)
    page.settle()
    tooltip = page.evaluate("document.querySelector('[data-chart=loss] .tooltip').innerText")
    assert "step 2" in tooltip
    assert "training" in tooltip
    assert page.evaluate("document.querySelectorAll('.overlay .cursor').length") == 9
    x = page.evaluate("+document.querySelector('[data-chart=loss] .cursor').getAttribute('x1')")
    assert x == pytest.approx(width / 2, abs=2)
    quiet(page)


def test_a_chart_can_be_read_with_the_keyboard(open_run: OpenRun) -> None:
    page = open_run()
    page.evaluate("document.querySelector('[data-chart=lr] svg').focus()")
    page.key("Home")
    assert page.evaluate("document.getElementById('readout').textContent") == (
        "step 1: learning rate 5e-5"
    )
    page.key("ArrowRight")
    page.key("ArrowRight")
    readout = page.evaluate("document.getElementById('readout').textContent")
    assert readout.startswith("step 9:")
    page.key("End")
    assert "step 400: learning rate 2e-4" in page.evaluate(
        "document.getElementById('readout').textContent"
    )
    label = page.evaluate(
        "document.querySelector('[data-chart=lr] svg').getAttribute('aria-label')"
    )
    assert "from 5e-5 at step 1 to 2e-4 at step 400" in label
    quiet(page)


def test_dragging_zooms_every_chart_and_the_button_resets(
    open_run: OpenRun,
) -> None:
    page = open_run()
    ticks = (
        "[...document.querySelectorAll('[data-chart=lr] .axes text[text-anchor=middle]')]"
        ".map(t => +t.textContent)"
    )
    whole = page.evaluate(ticks)
    left, top, width, height = centre(page, "[data-chart=loss] svg")
    y = top + height / 2
    page.mouse("move", left + 0.5 * width, y)
    page.mouse("press", left + 0.5 * width, y)
    page.mouse("move", left + 0.75 * width, y)
    page.mouse("release", left + 0.75 * width, y)
    page.settle()
    zoomed = page.evaluate(ticks)
    assert min(zoomed) >= 180
    assert max(zoomed) <= 310
    page.evaluate("document.getElementById('zoom-out').click()")
    assert page.evaluate(ticks) == whole
    quiet(page)


def test_an_axis_can_be_logarithmic(open_run: OpenRun) -> None:
    page = open_run()
    path = "document.querySelector('[data-chart=grad_norm] path.curve').getAttribute('d')"
    linear = page.evaluate(path)
    button = (
        "document.querySelector('[data-chart=grad_norm]').closest('figure').querySelector('.log')"
    )
    page.evaluate(f"{button}.click()")
    assert page.evaluate(path) != linear
    assert page.evaluate(f"{button}.getAttribute('aria-pressed')") == "true"
    page.evaluate(f"{button}.click()")
    assert page.evaluate(path) == linear
    quiet(page)


def test_smoothing_flattens_the_curve_and_keeps_the_readings_behind_it(open_run: OpenRun) -> None:
    page = open_run()

    def length(smoothing: int) -> float:
        page.evaluate(
            f"(() => {{ const s = document.getElementById('smoothing'); s.value = {smoothing};"
            "s.dispatchEvent(new Event('input')); })()"
        )
        return page.evaluate(
            "document.querySelector('[data-chart=throughput] path.curve').getTotalLength()"
        )

    rough, smooth = length(0), length(95)
    assert smooth < 0.5 * rough
    assert (
        page.evaluate("document.querySelectorAll('[data-chart=throughput] path.raw').length") == 1
    )
    assert page.evaluate("document.querySelectorAll('[data-chart=lr] path.raw').length") == 0


def test_a_short_run_is_not_smoothed_unasked(open_run: OpenRun, tmp_path: Path) -> None:
    lines = metrics_lines(steps=60, resume_at=None)
    page = open_run(write_run(tmp_path / "short", lines=lines))
    assert page.evaluate("document.querySelectorAll('path.raw').length") == 0
    assert page.evaluate("document.getElementById('smoothing-value').textContent") == "0.00"


def test_the_configuration_can_be_searched(open_run: OpenRun) -> None:
    page = open_run()
    shown = "[...document.querySelectorAll('table.config tbody tr')].filter(r => !r.hidden).length"
    everything = page.evaluate(shown)

    def search(text: str) -> int:
        page.evaluate(
            "(() => { const s = document.querySelector('.config-search');"
            f"s.value = {text!r}; s.dispatchEvent(new Event('input')); }})()"
        )
        return page.evaluate(shown)

    assert everything > 30
    assert search("lr warmup") == 1
    assert search("") == everything
    page.evaluate("document.querySelector('.config-set').click()")
    assert 10 < page.evaluate(shown) < everything
    assert "of 3" in page.evaluate("document.querySelector('.config-count').textContent")


def test_a_plugin_is_picked_out_where_it_acts(open_run: OpenRun) -> None:
    page = open_run()
    page.evaluate("document.querySelector('.plugins [data-plugin=ulysses]').click()")
    picked = page.evaluate(
        "[...document.querySelectorAll('.drawing .picked')].map(b => b.dataset.plugin)"
    )
    assert picked == ["ulysses"] * 3
    page.evaluate("document.querySelector('.plugins [data-plugin=ulysses]').click()")
    assert page.evaluate("document.querySelectorAll('.drawing .picked').length") == 0


def test_ranks_are_coloured_by_their_groups(open_run: OpenRun) -> None:
    page = open_run()
    names = "[...document.querySelectorAll('[data-rank] .group')].map(g => g.textContent)"
    assert page.evaluate(names) == ["cp group 0", "cp group 0"]
    page.evaluate("document.querySelector('[data-group=ep]').click()")
    assert page.evaluate(names) == ["ep group 0", "ep group 0"]
    page.evaluate("document.querySelector('[data-group=ep]').click()")
    assert page.evaluate(names) == ["", ""]


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [360, 820, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_at_any_width(open_run: OpenRun, width: int, scheme: str) -> None:
    page = open_run(width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        "[...document.querySelectorAll('.plot svg')].filter(s => {"
        "const b = s.getBoundingClientRect();"
        "return b.left < 0 || b.right > innerWidth + 0.5; }).length"
    )
    assert cut == 0
    quiet(page)


def test_the_page_follows_the_colour_scheme_of_the_reader(
    open_run: OpenRun, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "demo")

    def brightness(scheme: str) -> int:
        page = open_run(folder, scheme=scheme)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return max(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))

    assert brightness("light") > 230
    assert brightness("dark") < 30


def test_charts_are_drawn_again_when_the_window_changes(open_run: OpenRun) -> None:
    page = open_run(width=1280)
    box = "document.querySelector('[data-chart=loss] svg').getAttribute('viewBox')"
    before = page.evaluate(box)
    page.resize(700, 900)
    page.settle()
    page.settle()
    after = page.evaluate(box)
    assert float(after.split()[2]) < 700 < float(before.split()[2])


def test_hostile_files_run_no_script(open_run: OpenRun, tmp_path: Path) -> None:
    page = open_run(hostile_run(tmp_path / "hostile"))
    quiet(page)
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert page.evaluate("document.querySelectorAll('path.curve').length") > 5


def test_a_script_that_slips_in_is_refused(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    target = tmp_path / "report.html"
    write_report([read_run(folder)], target)
    planted = f"<script>window.planted = 1</script><img src={IMAGE} onerror='window.planted = 2'>"
    target.write_text(target.read_text().replace("<main>", f"<main>{planted}", 1))
    page = browser.open(target, View())
    assert page.evaluate("window.planted === undefined")
    assert page.evaluate("document.querySelectorAll('path.curve').length") > 5
    assert page.refused() == ["csp"], "the image is not fetched either"


def test_two_runs_are_drawn_in_one_chart(open_run: OpenRun, tmp_path: Path) -> None:
    first = write_run(tmp_path / "one")
    second = write_run(tmp_path / "two", lines=metrics_lines(steps=200, resume_at=None, seed=3))
    page = open_run(first, second)
    quiet(page)
    legend = page.evaluate("document.querySelector('[data-chart=loss] .legend').innerText")
    for name in ("one training", "one held-out", "two training", "two held-out"):
        assert name in legend
    assert page.evaluate("document.querySelectorAll('[data-heat] svg').length") == 2


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 1, "loss": 2.0}],
        [{"step": 7, "loss": "NaN"}, {"step": 8, "loss": "Infinity"}],
        [{"step": 1, "loss": 0.0}, {"step": 2, "loss": -1e300}, {"step": 3, "loss": 1e300}],
        [{"step": s, "loss": 5.0, "lr": 0.0} for s in range(4)],
        [{"step": 2**53 - 1, "loss": 1.0}, {"step": 0, "loss": 1e-300}],
        [{"step": s, "loss": s % 7 + 1.0} for s in range(20_000)],
        [{"step": s, "expert_load": [1 / 128] * 128} for s in range(1, 400)],
    ],
    ids=["none", "one", "not-finite", "huge", "flat", "far", "many", "experts"],
)
def test_no_readings_break_the_script(
    open_run: OpenRun, tmp_path: Path, lines: list[dict[str, object]]
) -> None:
    page = open_run(write_run(tmp_path / "odd", lines=lines))
    quiet(page)
    wrong = page.evaluate(
        "[...document.querySelectorAll('svg *')].filter(e => [...e.attributes]"
        ".some(a => /NaN|Infinity|undefined/.test(a.value))).length"
    )
    assert wrong == 0
    for button in range(page.evaluate("document.querySelectorAll('button.log:enabled').length")):
        page.evaluate(f"document.querySelectorAll('button.log:enabled')[{button}].click()")
    quiet(page)


def test_without_script_the_tables_tell_the_same(open_run: OpenRun) -> None:
    page = open_run(script=False)
    assert page.evaluate("document.querySelectorAll('path.curve').length") == 0
    text = page.evaluate("document.querySelector('figure.main').textContent")
    assert "0" + "8.3242" in text, "the held-out loss of step 0"
    shown = "[...document.querySelectorAll('.needs-script')].filter(e => e.offsetParent).length"
    assert page.evaluate(shown) == 0, "a control that does nothing is not shown"
