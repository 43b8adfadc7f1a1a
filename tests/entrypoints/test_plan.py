from __future__ import annotations

import json
from pathlib import Path

import pytest

from ascend_run.entrypoints.cli import run
from ascend_run.entrypoints.planning import prepare
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
    assert "sequence-exchange: relay" in lines
    assert "ranks: 2 = tp 1 x cp 2 x dp 1 x pp 1" in lines
    assert "cp groups: [0 1]" in lines
    assert any(line.split() == ["model.num_layers", "4", "run.toml:8"] for line in lines)


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

    page = output_of(capsys, "--config", str(file), *chunks)
    assert "  pp 1 holds layers 2 to 3, then 6 to 7\n" in page
    plan = json.loads(output_of(capsys, "--config", str(file), *chunks, "--json"))
    assert plan["layout"]["stages"] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_large_world_is_summed_up(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--nproc", "8", "--nnodes", "64", "train.global_batch_size=256")

    page = output_of(capsys, "--config", str(file), *size)

    assert "(not drawn: more than 256 ranks)" in page
    assert "and 248 more" in page
    assert len(page.splitlines()) < 100


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

    assert "note: 'relay' changes nothing in this run" in page


def test_json_is_what_the_run_folder_would_hold(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = json.loads(output_of(capsys, "--config", str(file), "--json"))

    assert shown == prepare(file).plan


def test_what_cannot_run_is_one_refusal(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--config", str(file), "--nproc", "3", "data.seq_length=65"]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: this run cannot start:\n")
    assert "3 ranks" in shown.err
    assert "data.seq_length=65" in shown.err
    assert "Traceback" not in shown.err


def test_features_may_be_named_in_several_ways(
    install: Install, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(install, "album")
    config = ("--config", str(file), "--json")

    once = output_of(capsys, *config, "--enable", "relay, album,")
    twice = output_of(capsys, *config, "--enable", "album", "--enable", "relay")

    assert json.loads(once) == json.loads(twice)
