from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.prepare.plan.json_values import plan_values
from ascend_run.prepare.prepare import prepare
from ascend_run.tools.plan.cost_model.devices import CALIBRATION
from ascend_run.tools.plan.costs import with_costs
from tests.support.demo import DEMO, NEEDS_ITS_FEATURES
from tests.support.fake_distributions import plugin_source
from tests.support.installed import Install, offer


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_the_page_shows_plugins_hooks_claims_ranks_and_settings(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.strip() for line in output_of(capsys, "--config", str(file)).splitlines()]

    order = [line.split()[0] for line in lines[3:7]]
    assert order == ["llama", "pretrain", "relay", "cpu"]
    assert any(line.startswith("ascend_sequence_partition  provider") for line in lines)
    assert "context-parallel: relay" in lines
    assert "ranks: 2 = tp 1 x cp 2 x dp 1 x pp 1" in lines
    assert "cp groups: [0 1]" in lines
    assert any(line.split() == ["model.num_layers", "4", "run.toml:8"] for line in lines)


def test_the_datasets_of_a_blend_are_shown_with_their_shares(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", str(file))
    assert "training data" not in output_of(capsys, *words)
    page = output_of(capsys, *words, 'data.train=["a", "b"]', "data.train_weights=[3, 1]")
    rows = [line.split() for line in page.splitlines()]
    assert ["a", "3", "75.00", "%"] in rows
    assert ["b", "1", "25.00", "%"] in rows
    page = output_of(capsys, *words, 'data.train=["a", "b"]')
    assert "read in proportion to their tokens" in page


@pytest.mark.needs_plugins("swap-attention")
def test_the_page_shows_links_around_forwards_where_there_are_any(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", str(file))
    assert "links around forwards" not in output_of(capsys, *words)

    option = 'plugins.swap-attention.modules=["input_layernorm"]'
    page = output_of(capsys, *words, "--enable", "relay,swap-attention", option)
    lines = [line.split() for line in page.splitlines()]
    assert ["links", "around", "forwards,", "innermost", "first"] in lines
    assert ["input_layernorm", "swap-attention"] in lines
    assert not any(line[:1] == ["self_attention"] for line in lines)


@pytest.mark.needs_plugins("swap-attention", "compile")
def test_the_html_shows_links_around_forwards_where_there_are_any(
    file: Path, tmp_path: Path
) -> None:
    def html(*words: str) -> str:
        target = tmp_path / "plan.html"
        assert run(["plan", "--config", str(file), *words, "--html", str(target)]) == 0
        return target.read_text()

    assert "Forwards:" not in html()

    option = 'plugins.swap-attention.modules=["input_layernorm"]'
    page = html("--enable", "relay,swap-attention,compile", option)
    assert "Forwards: the links around each kind of module" in page
    for row in (("input_layernorm", "swap-attention", ""), ("layer", "none", "compile")):
        module, links, compilers = row
        head = f'<th scope="row"><code>{module}</code></th>'
        assert f"{head}<td>{links}</td><td>{compilers}</td>" in page


def test_ranks_are_drawn_by_replica_and_place(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("parallel.tensor_model_parallel_size=2", "train.global_batch_size=2")

    page = output_of(capsys, "--config", str(file), "--nproc", "4", "--nnodes", "2", *overrides)

    rows = [line.split() for line in page.splitlines()]
    header = "pp 0 cp 0 tp 0 cp 0 tp 1 cp 1 tp 0 cp 1 tp 1"
    assert header.split() in rows
    assert ["dp", "0", "0", "1", "2", "3"] in rows
    assert ["dp", "1", "4", "5", "6", "7"] in rows
    assert "  tp groups: [0 1] [2 3] [4 5] [6 7]" in page


def test_the_layers_of_every_stage_are_shown(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = ("--nproc", "4", "parallel.pipeline_model_parallel_size=2")
    chunks = (*stages, "parallel.virtual_pipeline_model_parallel_size=2", "model.num_layers=8")
    chunks = (*chunks, "train.global_batch_size=4")

    page = output_of(capsys, "--config", str(file), *stages)
    assert "  pp 0 holds layers 0 to 1\n  pp 1 holds layers 2 to 3\n" in page

    page = output_of(capsys, "--config", str(file), *chunks, "model.mtp_num_layers=1")
    assert (
        "  pp 1 holds layers 2 to 3, then 6 to 7\n"
        "  pp 1 holds 1 layer of multi-token prediction besides\n"
    ) in page
    plan = json.loads(output_of(capsys, "--config", str(file), *chunks, "--json"))
    assert plan["layout"]["stages"] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


LARGE = (
    *("--config", str(DEMO), "--world", "7968", "--disable", "ulysses"),
    *("parallel.tensor_model_parallel_size=8", "parallel.pipeline_model_parallel_size=4"),
    *("parallel.context_parallel_size=1", "parallel.expert_model_parallel_size=3"),
    *("parallel.expert_tensor_parallel_size=1", "parallel.sequence_parallel=true"),
    *("train.global_batch_size=1992", "model.num_query_groups=8"),
    *("model.num_moe_experts=6", "model.num_layers=32"),
)


@NEEDS_ITS_FEATURES
def test_thousands_of_ranks_are_summed_up_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    page = output_of(capsys, *LARGE)
    lines = [" ".join(line.split()) for line in page.splitlines()]

    assert "ranks: 7968 = tp 8 x cp 1 x dp 249 x pp 4" in lines
    assert "pp 1 249 replicas of 8 ranks 1992-1999 2000-2007 2008-2015 ... 3976-3983" in lines
    (pp,) = (line for line in lines if line.startswith("pp groups:"))
    assert pp.startswith("pp groups: 1,992 groups of 4: [0 1992 3984 5976] [1 1993")
    assert pp.endswith("and 1,984 more")
    (dp,) = (line for line in lines if line.startswith("dp groups:"))
    assert dp.startswith("dp groups: 32 groups of 249: [0 8 16 ... 1984]")
    assert len(lines) < 200
    assert max(map(len, lines)) < 400


@NEEDS_ITS_FEATURES
def test_many_stages_are_not_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    stages = ("parallel.pipeline_model_parallel_size=32", "--world", "7968", *LARGE[:2])
    sizes = ("--disable", "ulysses,gmm", "parallel.context_parallel_size=1")
    batch = ("train.global_batch_size=249", "train.micro_batch_size=1", "model.num_layers=64")

    page = output_of(capsys, *stages, *sizes, *batch)

    assert page.count("holds layers") == 4
    assert sum(line.strip() == "and 28 more" for line in page.splitlines()) == 2


@NEEDS_ITS_FEATURES
def test_every_rank_of_a_large_world_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(output_of(capsys, *LARGE, "--json"))

    assert [rank["rank"] for rank in plan["ranks"]] == list(range(7968))
    assert plan["ranks"][7967] == {"rank": 7967, "tp": 7, "cp": 0, "dp": 248, "pp": 3, "ep": 2}


@NEEDS_ITS_FEATURES
@pytest.mark.parametrize("words", [("--config", str(DEMO)), LARGE], ids=["demo", "7968"])
def test_the_result_needs_no_torch(words: Sequence[str]) -> None:
    """Nor anything else that takes long to import; ``benchmarks`` has the seconds."""
    source = (
        "import sys; from ascend_run.entrypoints.cli import run; code = run(sys.argv[1:]);"
        "print(sorted({'torch', 'megatron', 'numpy', 'yaml', 'rich'} & {*sys.modules}),"
        " file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, "plan", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


def test_only_chosen_values_are_shown_unless_all_are_asked(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = output_of(capsys, "--config", str(file), "train.train_iters=7")
    everything = output_of(capsys, "--config", str(file), "--all")

    assert "train.train_iters" in chosen
    assert "command line" in chosen
    assert "train.log_interval" not in chosen
    assert "train.log_interval" in everything
    assert "Megatron's default" in everything


def test_a_plugin_without_effect_is_noted(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = output_of(capsys, "--config", str(file), "parallel.context_parallel_size=1")

    assert "note: 'relay' has no effect in this run" in page


def test_json_is_what_the_run_folder_would_hold(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = json.loads(output_of(capsys, "--config", str(file), "--json"))

    assert shown == plan_values(with_costs(prepare(file)).plan)


def test_what_cannot_run_is_one_refusal(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--config", str(file), "--nproc", "3", "data.seq_length=65"]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: this run cannot start:\n")
    assert "3 ranks" in shown.err
    assert "data.seq_length=65" in shown.err
    assert "Traceback" not in shown.err


def test_what_cannot_run_is_json_where_json_is_asked_for(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--config", str(file), "--nproc", "3", "--json"]) == 2

    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert told["error"] == "this run cannot start"
    assert "3 ranks" in told["problems"][0]
    assert (told["conflicts"], told["can_run"], shown.err) == ([], [], "")


def test_what_excludes_what_is_in_the_json(
    install: Install, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(install, "album")
    offer(install, "circle", plugin_source("circle", "claims=(Claim.CONTEXT_PARALLEL,)"))
    assert run(["plan", "--enable", "album,relay,circle", "--json"]) == 2

    told = json.loads(capsys.readouterr().out)
    assert [conflict["plugins"] for conflict in told["conflicts"]] == [["circle", "relay"]]
    assert told["conflicts"][0]["why"].endswith("which only one plugin can own")
    assert told["can_run"] == [["album", "relay"], ["album", "circle"]]


def test_all_ranks_are_counted_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--config", str(file), "--world", "4", "--nproc", "2"]) == 2
    assert "leave out --nproc and --nnodes" in capsys.readouterr().err


def test_every_value_says_where_it_comes_from(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train.train_iters=7", "model.family=llama", "--all")
    page = output_of(capsys, "--config", str(file), *words)
    rows = page.split("\nsettings\n")[1].splitlines()[2:]

    origins = {re.split(r" {2,}", row.strip())[-1] for row in rows}
    known = r"run\.toml:\d+|command line|family 'llama'|(plugin |Megatron's )?default"
    assert {origin for origin in origins if not re.fullmatch(known, origin)} == set()
    assert {"command line", "family 'llama'", "default", "Megatron's default"} <= origins
    assert len(rows) > 200


def test_features_may_be_named_in_several_ways(
    install: Install, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(install, "album")
    config = ("--config", str(file), "--json")

    once = output_of(capsys, *config, "--enable", "relay, album,")
    twice = output_of(capsys, *config, "--enable", "album", "--enable", "relay")

    assert json.loads(once) == json.loads(twice)


def test_a_page_that_would_overwrite_what_the_plan_reads_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = file.parent / "device.json"
    device.write_text(CALIBRATION.read_text())
    tokens = file.parent / "corpus.bin"
    tokens.write_bytes(b"tokens")
    before = {path: path.read_bytes() for path in (file, device, tokens)}
    words = ["plan", "--config", str(file), "--device", str(device), f"data.train={tokens}"]
    for name, path in (("--config", file), ("--device", device), ("data.train", tokens)):
        assert run([*words, "--html", str(path)]) == 2
        assert f"--html ({path}) would overwrite {name} ({path})" in capsys.readouterr().err
        assert run([*words, "--html", str(path), "--json"]) == 2
        assert name in json.loads(capsys.readouterr().out)["problems"][0]
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("hook", ["ascend_check", "ascend_cost"])
@pytest.mark.parametrize("error", ["ConfigError", "RuntimeError"])
def test_an_exception_of_a_plugin_is_named(
    install: Install, file: Path, capsys: pytest.CaptureFixture[str], hook: str, error: str
) -> None:
    source = "from ascend_run.plugin_api import ConfigError\n" + plugin_source("broken")
    source += f"\n    @hookimpl\n    def {hook}(self):\n        raise {error}('planted')\n"
    offer(install, "broken", source)
    words = ["plan", "--config", str(file), "--enable", "relay,broken"]
    note = f"raised by 'broken' of ascend-run-broken 1.0 in {hook}"
    if error == "RuntimeError":
        with pytest.raises(RuntimeError, match="planted") as raised:
            run(words)
        assert raised.value.__notes__ == [note]
        return
    assert run(words) == 2
    assert capsys.readouterr().err == f"error: planted:\n  {note}\n"
