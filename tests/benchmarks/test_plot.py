"""The picture: a bar a row, to the right of the line where the goal is met."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.plot import svg
from benchmarks.rows import Row, bounded, compared, unmeasured

NAMESPACE = {"s": "http://www.w3.org/2000/svg"}


def bars(rows: list[Row]) -> list[tuple[float, float]]:
    """Left and right end of every bar."""
    root = ElementTree.fromstring(svg(rows))
    found = root.findall("s:rect", NAMESPACE)[1:]  # the first one is the background
    return [(x := float(bar.get("x", "")), x + float(bar.get("width", ""))) for bar in found]


def limited(value: float) -> Row:
    return bounded(name="a < b", value=value, limit=80, unit="ns", note="", device="cpu")


def test_what_is_met_lies_right_of_the_line_and_what_is_missed_left() -> None:
    (_, missed_end), (met_begin, met_end) = bars([limited(160), limited(40)])
    assert missed_end == met_begin < met_end


def test_bars_end_with_the_axis_however_far_the_result() -> None:
    far, farther = bars([limited(1), limited(0.001)])
    assert far == farther


def test_every_row_is_named_and_unmeasured_rows_have_no_bar() -> None:
    rows = [
        compared(name="x", ours=[2], peer=[1], unit="s", goal=1, note="", device="cpu"),
        unmeasured(name="gone", goal=">= 1 x", reason="no peer", device="cpu"),
    ]
    texts = "".join(ElementTree.fromstring(svg(rows)).itertext())
    assert len(bars(rows)) == 1
    assert "2 x  (goal >= 1 x)" in texts
    assert "gone" in texts
    assert "not measured" in texts
