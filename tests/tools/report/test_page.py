"""The page as text: whole, closed, and deaf to whatever the files of a run say."""

from __future__ import annotations

import json
import os
import re
import stat
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_run.plugin_api import Point, StorageError
from ascend_run.plugin_api.hookspecs import hook_points
from ascend_run.tools.pages.hook_points import seams_by_point
from ascend_run.tools.pages.markup import Markup, data_block, element
from ascend_run.tools.pages.record_reading import read_plan
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.report.page import write_report
from ascend_run.tools.report.series import POINTS as MOST_POINTS

from .run_folders import CONFIG, PLAN, metrics_lines, write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!--"


class Outline(HTMLParser):
    """Elements, their attributes and texts; fails where an element is not closed in its place."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.stack[-1] if self.stack else "", data))

    def all_text(self) -> str:
        return "".join(text for where, text in self.texts if where not in ("script", "style"))


def page_of(*folders: Path) -> str:
    target = folders[0] / "report.html"
    write_report([read_run(folder) for folder in folders], target)
    return target.read_text(encoding="utf-8")


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page)
    assert found
    return json.loads(found[1])


def hostile_run(folder: Path) -> Path:
    """A run whose every name and text tries to leave its place in the page."""
    text = json.dumps(PLAN).replace("ulysses", "HOSTILE").replace("first", "HOSTILE")
    plan = json.loads(text.replace("HOSTILE", json.dumps(HOSTILE)[1:-1]))
    plan["panels"] = [{"title": HOSTILE, "metrics": [HOSTILE, "loss"], "unit": HOSTILE}]
    plan["versions"] = {HOSTILE: HOSTILE}
    plan["device"] = HOSTILE
    plan["layout"]["groups"][HOSTILE] = [[0, 1]]
    plan["layout"]["axes"][HOSTILE] = 2
    lines = [{**line, HOSTILE: 1.0} if "loss" in line else line for line in metrics_lines(20, None)]
    lines[-1] = {"event": "failure", "error": HOSTILE}
    log = [{"level": "warning", "event": HOSTILE, HOSTILE: HOSTILE, "exception": HOSTILE}]
    escaped = json.dumps(HOSTILE)
    config = CONFIG.replace('"mixtral"', escaped) + f"{escaped} = {escaped}  # {HOSTILE}\n"
    return write_run(folder, lines=lines, plan=plan, log=log, config=config)


def test_the_page_shows_every_part_of_the_run(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "demo"))
    outline = Outline(page)
    text = outline.all_text()
    for part in (
        "8.3242 \N{RIGHTWARDS ARROW} 3.9",
        "tokens/s",
        "torch 2.13.0",
        "finished",
        "Expert load",
        "Expert load by layer",
        "swap-attention",
        "demo.toml:7",
        "Transformer Engine is not installed",
        "cp 1",
    ):
        assert part in text
    titles = [text for tag, text in outline.texts if tag == "h2"]
    assert titles == ["Curves", "The plan", "Ranks", "Configuration", "Warnings"]
    assert set(data_of(page)["charts"]) == {
        *("loss", "lr", "grad_norm", "throughput", "memory", "step_time", "aux_loss"),
        "panel-0-0",
    }


def test_nothing_in_the_page_names_another_file(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "demo"))
    for tag, attributes in Outline(page).elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "a")
        assert not {"src", "href", "style", "action"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name space, which is never fetched"


def test_the_content_policy_lets_only_the_pages_own_script_run(tmp_path: Path) -> None:
    outline = Outline(page_of(write_run(tmp_path / "demo")))
    (policy,) = [
        attributes["content"]
        for tag, attributes in outline.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[\w+/=]+'; script-src 'sha256-[\w+/=]+'", policy
    )


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    page = page_of(hostile_run(tmp_path / "<b>run"))
    outline = Outline(page)
    assert [tag for tag, _ in outline.elements if tag == "script"] == ["script", "script"]
    assert not [tag for tag, _ in outline.elements if tag in ("img", "b>run")]
    assert HOSTILE in outline.all_text()
    assert HOSTILE in data_of(page)["charts"]["panel-0-0"]["title"]


@given(st.text())
def test_no_text_leaves_its_element_or_its_data(text: str) -> None:
    outline = Outline(element("p", text, title=text))
    assert [tag for tag, _ in outline.elements] == ["p"]
    block = data_block("x", {text: [text]})
    inside = block.removeprefix('<script type="application/json" id="x">')
    inside = inside.removesuffix("</script>")
    assert "<" not in inside
    assert json.loads(inside) == {text: [text]}


def test_markup_is_not_escaped_twice() -> None:
    assert element("p", Markup("<b>x</b>"), "<") == "<p><b>x</b>&lt;</p>"


def test_a_long_run_is_reduced_and_the_page_says_so(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0 / step} for step in range(1, 30_001)]
    page = page_of(write_run(tmp_path / "demo", lines=lines))
    (line,) = data_of(page)["charts"]["loss"]["lines"]
    assert len(line["x"]) == len(line["y"]) == len(line["low"]) <= MOST_POINTS
    assert (
        "30,000 values drawn as 1,500 points: each is the mean of 20, the band their range." in page
    )
    assert len(page) < 300_000


def test_readings_that_are_not_finite_do_not_break_the_data(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": "NaN"}, {"step": 2, "loss": "Infinity"}, {"step": 3, "loss": 2.0}]
    (line,) = data_of(page_of(write_run(tmp_path / "demo", lines=lines)))["charts"]["loss"]["lines"]
    assert line["y"] == [None, None, 2.0]
    assert line["notFinite"] == [[1, "nan"], [2, "inf"]]


def test_the_page_says_what_a_cross_means(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "NaN"}]
    sentence = "A cross marks a step whose value is NaN or infinite."
    assert sentence in page_of(write_run(tmp_path / "bad", lines=lines))
    assert sentence not in page_of(write_run(tmp_path / "good", lines=lines[:1]))


def test_a_metric_that_no_panel_asked_for_is_shown_all_the_same(tmp_path: Path) -> None:
    lines = [{"step": 1, "router.entropy": 0.5, "time": 5.0}, {"step": 2, "router.entropy": 0.6}]
    charts = data_of(page_of(write_run(tmp_path / "demo", lines=lines)))["charts"]
    assert [chart["title"] for chart in charts.values()] == ["router.entropy"]


@pytest.mark.parametrize(
    "name", ["config.toml", "plan.json", "plugins.lock.json", "metrics.jsonl", "log.jsonl"]
)
def test_the_page_comes_without_a_file_and_says_which(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "demo")
    (folder / name).unlink()
    text = Outline(page_of(folder)).all_text()
    assert f"{name} is missing" in text
    assert "Missing from this page" in text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(
    plan=st.fixed_dictionaries(dict.fromkeys(PLAN, json_values)),
    line=st.dictionaries(
        st.sampled_from(["step", "loss", "event", "expert_load", "expert_load_by_layer", "time"]),
        json_values,
    ),
    scores=st.dictionaries(
        st.sampled_from(["step", "name", "asked", "checkpoint", "values"]), json_values
    ),
)
def test_no_shape_of_the_files_keeps_the_page_from_coming(
    tmp_path_factory: pytest.TempPathFactory, plan: Any, line: Any, scores: Any
) -> None:
    folder = write_run(
        tmp_path_factory.mktemp("runs") / "demo", plan=plan, lines=[{"step": 1, "loss": 2.0}, line]
    )
    lines = (scores, {"step": 1, "values": {"a": 0.5, **scores}}, {"step": 2**60})
    (folder / "evaluations.jsonl").write_text("\n".join(map(json.dumps, lines)))
    Outline(page_of(folder))


def test_several_runs_stand_in_one_page_with_their_differences(tmp_path: Path) -> None:
    first = write_run(tmp_path / "one")
    second = write_run(
        tmp_path / "two",
        config=CONFIG.replace("lr = 0.002 ", "lr = 0.001 "),
        lines=metrics_lines(seed=3),
    )
    page = page_of(first, second)
    text = Outline(page).all_text()
    assert "optimizer.lr0.0020.001" in text.split("Where the runs differ")[1]
    assert [line["run"] for line in data_of(page)["charts"]["loss"]["lines"]] == [0, 0, 1, 1]


def test_runs_of_one_name_are_distinguished_by_path(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "demo") for parent in ("one", "two")]
    assert data_of(page_of(*folders))["runs"] == [str(folder) for folder in folders]


def test_every_hook_is_drawn_at_the_point_that_its_specification_names() -> None:
    hooks = [{"hook": n, "kind": str(p.kind), "owners": ["x"]} for n, p in hook_points().items()]
    drawn = seams_by_point(read_plan({"hooks": hooks}).hooks)
    for name, point in hook_points().items():
        assert name.removeprefix("ascend_") in {seam.name for seam in drawn[point.point]}


def test_wrappers_are_drawn_around_what_they_wrap(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "demo"))
    seam = page[page.index("<code>attention</code>") :]
    drawn = re.findall(r'class="box[^"]*" data-plugin="([\w-]+)"', seam)[:3]
    assert drawn == ["swap-attention", "ulysses", "cpu"], "outermost first, each inside the last"


def test_features_have_colours_and_the_rest_is_grey(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "demo"))
    buttons = re.findall(
        r'<button type="button" class="box plugin (p\d)" data-plugin="([\w-]+)"', page
    )
    assert {name: colour for colour, name in buttons} == {
        "mixtral": "p5",
        "pretrain": "p5",
        "ulysses": "p0",
        "gmm": "p1",
        "swap-attention": "p2",
        "cpu": "p5",
    }


def test_a_hook_that_this_version_does_not_know_is_drawn_too() -> None:
    hooks = [{"hook": "ascend_telepathy", "kind": "oracle", "owners": ["gmm"]}]
    seams = seams_by_point(read_plan({"hooks": hooks}).hooks)
    assert [seam.name for seam in seams[Point.RUN]] == ["telepathy"]


def test_what_the_drawing_cannot_show_is_said(tmp_path: Path) -> None:
    plan = {
        **PLAN,
        "idle": {"ulysses": "parallel.context_parallel_size == 1"},
        "patching": ["cpu"],
        "environment": {"OMP_NUM_THREADS": "4"},
    }
    text = Outline(page_of(write_run(tmp_path / "demo", plan=plan))).all_text()
    assert "ulysses has no effect in this run, because parallel.context_parallel_size == 1" in text
    assert "cpu patches functions of other packages" in text
    assert "environment: OMP_NUM_THREADS=4" in text
    assert "2 ranks; tp 1, cp 2, dp 1, pp 1; experts: expt_tp 1, ep 2, expt_dp 1, pp 1" in text


def test_many_ranks_are_drawn_as_blocks(tmp_path: Path) -> None:
    ranks = [{"rank": r, "tp": r % 8, "cp": 0, "dp": r // 8, "pp": 0} for r in range(2000)]
    ranks[5]["dp"] = "?"  # type: ignore[assignment]
    plan = {**PLAN, "ranks": ranks}
    page = page_of(write_run(tmp_path / "demo", plan=plan))
    assert page.count("data-rank=") == 0
    assert page.count("<rect") == 250
    assert "pp 0, dp 249: ranks 1,992 to 1,999" in page


def test_the_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    target = folder / "report.html"
    target.write_text("old")
    write_report([read_run(folder)], target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_file_that_cannot_be_written_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "demo")
    with pytest.raises(StorageError, match="--output"):
        write_report([read_run(folder)], tmp_path / "nowhere" / "report.html")

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match="No space left"):
        write_report([read_run(folder)], folder / "report.html")
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
