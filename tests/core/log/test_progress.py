"""Progress: what is shown, where, and that showing it costs next to nothing."""

from __future__ import annotations

import io

import pytest

from ascend_run.core.log import progress as progress_module
from ascend_run.core.log.progress import Progress, duration, format_readings
from tests.support.clock import Clock

READINGS = {"loss": 3.21454, "lr": 2.9e-4, "tokens_per_second": 12345.6, "grad_norm": 1.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_plain_lines_ten_seconds_apart_and_the_last_step() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(total=100, stream=stream, clock=clock) as progress:
        for step in range(1, 101):
            progress.update(step, READINGS)
            clock.now += 1.0
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [
        *(f"{step}/100" for step in range(1, 101, 10)),
        "100/100",
    ]
    assert lines[1] == ("step 11/100  loss 3.2145  lr 2.90e-04  12,346 tokens/s  0:01:29 left")
    assert "\x1b" not in stream.getvalue()


def test_the_time_left_leaves_out_the_first_step() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(total=1000, start=500, stream=stream, clock=clock) as progress:
        clock.now = 60.0  # compilation
        progress.update(501)
        clock.now = 80.0
        progress.update(511)
    assert stream.getvalue().splitlines()[-1] == "step 511/1000  0:16:18 left"


def test_a_terminal_gets_a_bar_with_the_readings() -> None:
    stream = Terminal()
    with Progress(total=10, stream=stream) as progress:
        for step in range(1, 11):
            progress.update(step, READINGS)
    text = stream.getvalue()
    assert "step 10/10" in text
    assert "loss 3.2145" in text
    assert "12,346 tokens/s" in text


def test_standard_output_that_is_no_terminal_is_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(total=10, stream=Terminal()):
        print("result")
    assert capsys.readouterr().out == "result\n"


def test_markup_in_readings_is_not_interpreted() -> None:
    stream = Terminal()
    with Progress(total=1, stream=stream) as progress:
        progress.update(1, {"loss": "[bold]x"})
    assert "step 1/1" in stream.getvalue()


def test_an_interrupted_run_shows_where_it_stopped() -> None:
    stream, clock = io.StringIO(), Clock()

    def interrupted() -> None:
        with Progress(100, stream=stream, clock=clock) as progress:
            progress.update(1)
            progress.update(2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.getvalue().splitlines()[-1].startswith("step 2/100")


def test_drawing_that_takes_long_is_done_less_often() -> None:
    clock = Clock()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            clock.now += 0.05
            return super().write(text)

    stream = Slow()
    with Progress(total=10_000, stream=stream, clock=clock) as progress:
        for step in range(1, 1001):
            progress.update(step)
            clock.now += 0.1
    spent = stream.getvalue().count("\n") * 0.1  # two writes a line
    assert spent <= 0.005 * clock.now


def test_an_update_between_two_drawings_reads_the_clock_and_draws_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, clock = Terminal(), Clock()
    with Progress(total=1_000_000, stream=stream, clock=clock) as progress:
        progress.update(1, READINGS)
        drawn, read = stream.getvalue(), clock.reads
        with monkeypatch.context() as patch:
            patch.setattr(
                progress_module, "format_readings", None
            )  # nothing is put into words either
            for step in range(2, 2002):
                progress.update(step, READINGS)
        assert stream.getvalue() == drawn
        assert clock.reads - read == 2000


def test_readings_that_are_missing_or_no_number_are_left_out() -> None:
    assert format_readings({"loss": None, "lr": "NaN"}) == "lr nan"
    assert format_readings({}) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03"), (-1, "0:00:00")]
)
def test_durations_are_hours_minutes_seconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text
