"""``bisect RUN_A RUN_B``: what it finds, with a stub of the comparison, and refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.testing.offering import offered
from ascend_run.tools.bisect import searching
from ascend_run.tools.bisect.bisection import Bisection, bisect
from ascend_run.tools.bisect.choices import Compared, State
from ascend_run.tools.bisect.journal import Journal
from ascend_run.tools.bisect.mixing import Mixing
from ascend_run.tools.bisect.run_comparing import RunComparer
from ascend_run.tools.bisect.text import text_of
from ascend_run.tools.verify.questions import Side
from ascend_run.tools.verify.ranks import NoVerdict

from .made_up import HARMLESS, DoublesAGradient, Rounds
from .test_bisection import Stopped
from .two_runs import mixing_of, write_fingerprints, write_run, write_tokens

VALUES = {
    "optimizer.adam_eps": 1e-2,
    "optimizer.weight_decay": 0.25,
    "optimizer.adam_beta1": 0.5,
    "run.seed": 5,
    "parallel.tensor_model_parallel_size": 2,
    "parallel.sequence_parallel": True,
}


class StubComparer(RunComparer):
    """Compares nothing: a mixed run diverges if it has all of the guilty choices."""

    def __init__(self, mixing: Mixing, guilty: Sequence[str], stop_after: int | None = None):
        super().__init__(mixing, ranks=None)  # type: ignore[arg-type]
        self.guilty, self.stop_after = {*guilty}, stop_after
        self.compared: list[tuple[str, ...]] = []

    def __call__(self, names: Sequence[str]) -> Compared:
        if len(self.compared) == self.stop_after:
            raise Stopped
        changes = self.with_needed(names)
        self.compared.append(changes)
        if self.guilty <= {*changes}:
            where = "decoder.layers.1.mlp (backward)"
            return Compared(changes=changes, state=State.DIVERGES, where=where, step=1)
        return Compared(changes=changes, state=State.AGREES)


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory) -> Mixing:
    """Two runs with twelve choices, of which three need one another."""
    folder = tmp_path_factory.mktemp("runs")
    names = [plugin.manifest.name for plugin in (*HARMLESS[:4], DoublesAGradient)]
    with offered(*HARMLESS[:4], DoublesAGradient):
        one = write_run(folder / "a")
        return mixing_of(one, write_run(folder / "b", VALUES, names, world_size=2))


def searched(compare: StubComparer, folder: Path) -> Bisection:
    return bisect(compare, Journal(folder, {"run": 1}), lambda number, changes: None)


def test_any_one_choice_is_found_in_log2_of_them(mixing: Mixing, tmp_path: Path) -> None:
    assert len(mixing.choices) == 12
    for choice in mixing.choices:
        compare = StubComparer(mixing, [choice.name])
        assert searched(compare, tmp_path).culprits == (choice.name,)
        assert len(compare.compared) <= math.ceil(math.log2(12)) + 3
        assert len({*compare.compared}) == len(compare.compared)


@pytest.mark.parametrize(
    "guilty",
    [("doubles-a-gradient", "optimizer.adam_eps"), ("run.seed", "sp"), ("harmless-1", "tp")],
    ids="-".join,
)
def test_two_choices_that_only_part_together_are_both_found(
    mixing: Mixing, tmp_path: Path, guilty: tuple[str, str]
) -> None:
    compare = StubComparer(mixing, guilty)
    result = searched(compare, tmp_path)
    assert result.culprits is not None
    assert {*result.culprits} == {*guilty}
    assert len(compare.compared) <= 2 * (math.ceil(math.log2(12)) + 1) + 2


@pytest.mark.parametrize("stop", range(10))
def test_a_search_stopped_after_any_comparison_repeats_none(
    mixing: Mixing, tmp_path: Path, stop: int
) -> None:
    guilty = ("run.seed", "harmless-1")
    whole = StubComparer(mixing, guilty)
    expected = searched(whole, tmp_path)
    assert len(whole.compared) > stop
    first, second = StubComparer(mixing, guilty, stop), StubComparer(mixing, guilty)
    with pytest.raises(Stopped):
        searched(first, tmp_path)
    assert searched(second, tmp_path) == expected
    assert [*first.compared, *second.compared] == whole.compared


def test_a_mixed_run_that_dies_cannot_run_and_run_b_has_no_verdict(mixing: Mixing) -> None:
    def ranks(side: Side) -> list[Any]:
        if side.name == "A":
            return []
        raise NoVerdict.of(side, "rank 0: it died\nTraceback ...")

    compare = RunComparer(mixing, ranks)  # type: ignore[arg-type]
    with offered(*HARMLESS[:4], DoublesAGradient):
        mixed = compare(["run.seed"])
        assert (mixed.state, mixed.why) == (State.CANNOT_RUN, "rank 0: it died")
        with pytest.raises(NoVerdict):
            compare([choice.name for choice in mixing.choices])


def test_the_next_command_verifies_the_plugin_in_the_config_of_b(
    mixing: Mixing, tmp_path: Path
) -> None:
    result = searched(StubComparer(mixing, ["harmless-1", "run.seed"]), tmp_path)
    lines = [*text_of(attrs.evolve(result, runs=("a", "b")))]
    assert lines[0].startswith("plugin 'harmless-1' and setting 'run.seed' make the runs part, ")
    assert "next: ascend-run verify --details --enable harmless-1 --config b/config.toml" in lines


def test_the_text_names_what_a_choice_needs_and_fits_the_terminal(
    mixing: Mixing, tmp_path: Path
) -> None:
    result = searched(StubComparer(mixing, ["sp"]), tmp_path)
    lines = [*text_of(attrs.evolve(result, runs=("a", "b")), width=100)]
    assert lines[0].startswith("layout axis 'sp' makes the runs part, ")
    assert lines[1:3] == [
        "sp: not set in A, true in B",
        "with it: ranks, tp, without which it cannot run",
    ]
    assert max(map(len, lines)) <= 100
    assert max(map(len, text_of(result))) > 150


Break = Callable[[Path, Path], None]


def same_folder(one: Path, other: Path) -> None:
    shutil.rmtree(other)
    other.symlink_to(one)


def same_config(one: Path, other: Path) -> None:
    shutil.copy(one / "config.toml", other / "config.toml")


def other_data(one: Path, other: Path) -> None:
    file = other / "config.toml"
    file.write_text(file.read_text().replace('["tokens"]', '["others"]'))


def other_content(one: Path, other: Path) -> None:
    for folder, digest in ((one, "a"), (other, "b")):
        identity = {"size_bytes": 5, "sha256_of_ends": 64 * digest}
        about = {"format": 1, "data": {"tokens": {"bin": identity, "idx": None}}}
        (folder / "environment.json").write_text(json.dumps(about))


def same_steps(one: Path, other: Path) -> None:
    for folder in (one, other):
        write_fingerprints(folder, [4.5, 4.0])


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda one, other: shutil.rmtree(other), "no run folder"),
        (lambda one, other: (other / "config.toml").unlink(), "has no config to compare"),
        (lambda one, other: (other / "config.toml").write_text("="), "has no config to compare"),
        (same_folder, "nothing to bisect: both are the run folder"),
        (same_config, "nothing to bisect: the configs of the runs are the same"),
        (same_steps, "nothing to bisect: the runs are identical over steps 1 to 2"),
        (other_data, "data.train is tokens in A, and others in B"),
        (other_content, "data tokens.bin: 5 bytes"),
    ],
    ids=[
        "no folder",
        "no config",
        "no toml",
        "one folder",
        "one config",
        "same steps",
        "other data",
        "other content",
    ],
)
def test_runs_that_cannot_be_bisected_are_one_message_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: Break, said: str
) -> None:
    one = write_run(tmp_path / "a")
    other = write_run(tmp_path / "b", {"optimizer.adam_eps": 1e-8})
    broken(one, other)
    assert run(["bisect", str(one), str(other)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("error: ") == 1
    assert captured.out == ""


def test_both_folders_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bisect", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "a") in said
    assert str(tmp_path / "b") in said


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "two run folders"), (["a"], "got a"), (["a", "b", "--task", "sft"], "--task")],
    ids=["nothing", "one run", "option of plugins"],
)
def test_words_that_are_no_request_are_a_usage_error(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert run(["bisect", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command on two runs in an empty folder, with a stub of the comparison."""
    monkeypatch.chdir(tmp_path)
    data = {"data.train": [write_tokens(tmp_path)]}
    one = write_run(tmp_path / "a", data)
    other = write_run(tmp_path / "b", {**data, "optimizer.adam_eps": 1e-8, "run.seed": 9})
    for folder, loss in ((one, 3.5), (other, 3.25)):
        write_fingerprints(folder, [4.5, 4.0, loss])

    def called(
        guilty: str, *words: str, other: str = "b", stop_after: int | None = None
    ) -> tuple[int, str, str]:
        def comparer(mixing: Mixing, ranks: Any) -> StubComparer:
            return StubComparer(mixing, [guilty], stop_after)

        monkeypatch.setattr(searching, "RunComparer", comparer)
        code = run(["bisect", "a", other, *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return called


def test_the_verdict_comes_first_with_the_step_of_the_runs(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, err = command("optimizer.adam_eps")
    lines = out.splitlines()
    assert code == 1
    place = "at step 3, in decoder.layers.1.mlp (backward)"
    assert lines[:2] == [
        f"setting 'optimizer.adam_eps' makes the runs part, {place}",
        "optimizer.adam_eps: 0.001 in A, 1e-08 in B",
    ]
    assert "note: compared over 4 steps, bitwise" in lines
    assert sum("DIVERGES" in line or "agrees" in line for line in lines) == err.count("bisect:")


def test_runs_that_agree_in_the_comparison_are_code_0(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, _ = command("of another run", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["culprits"] is None
    assert found["runs"] == ["a", "b"]
    assert {choice["name"] for choice in found["choices"]} == {"optimizer.adam_eps", "run.seed"}


def test_a_step_within_tolerances_is_that_of_the_comparison(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    values = {"data.train": [str(tmp_path / "tokens")], "run.seed": 9}
    with offered(Rounds):
        other = write_run(tmp_path / "c", values, ["rounds"])
        write_fingerprints(other, [4.5, 4.0, 3.25])
        _, out, _ = command("run.seed", other="c")
    lines = out.splitlines()
    assert lines[0].startswith("setting 'run.seed' makes the runs part, at step 1, in ")
    assert "note: compared over 4 steps, within the tolerances of verify, for rounds" in lines
    assert "note: the runs themselves differ from step 3 on, first in: loss" in lines


def test_the_same_command_continues_unless_it_is_to_start_over(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, _, err = command("run.seed", stop_after=1)
    assert code == 3
    assert "bisect itself failed" in err
    _, out, continued = command("run.seed")
    assert "bisect: continues bisect-" in continued
    command("run.seed", stop_after=1)
    _, again, fresh = command("run.seed", "--fresh")
    assert "continues" not in fresh
    assert again == out
    assert fresh.count("bisect: ") == continued.count("bisect: ")
