"""The plugin's declarations, environment variables and switches: on during a run, restored
after."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.plugin_api import Numerics, RunConfig
from ascend_run.plugins.numerics.deterministic import Deterministic, DeterministicConfig
from ascend_run.plugins.numerics.deterministic.variables import variables_of
from ascend_run.types.config import RunSection
from tests.support.probed_runs import built, probe, train
from tests.support.tiny_configs import model_fields, parallel_fields


def switches() -> dict[str, Any]:
    """Return every setting of torch that the plugin changes."""
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": torch.backends.cudnn.deterministic,
        "benchmark": torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.deterministic,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
    }


def write_in_any_order() -> None:
    """Run an operation without a deterministic implementation, on the CPU too."""
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def variables(platform: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    return variables_of(platform, 17, environment or {})


def test_it_may_change_the_order_of_sums_only() -> None:
    assert Deterministic.manifest.numerics is Numerics.ROUNDING


def test_each_platform_has_its_variables_and_every_one_pythons_hashes() -> None:
    cuda, npu, cpu = variables("cuda"), variables("npu"), variables("cpu")
    assert cuda == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "PYTHONHASHSEED": "17",
    }
    assert npu == {
        "HCCL_DETERMINISTIC": "true",
        "CLOSE_MATMUL_K_SHIFT": "1",
        "PYTHONHASHSEED": "17",
    }
    assert cpu["MKL_CBWR"] == "AUTO,STRICT"
    assert variables("another") == {"PYTHONHASHSEED": "17"}


def test_an_equivalent_user_value_is_kept_and_any_other_is_replaced() -> None:
    own = {"NCCL_ALGO": "Tree", "CUBLAS_WORKSPACE_CONFIG": ":0:0", "PYTHONHASHSEED": "5"}
    assert variables("cuda", own) == {
        "NCCL_ALGO": "Tree",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the launcher rejects the user's value
        "PYTHONHASHSEED": "5",
    }
    assert variables("cuda", {"PYTHONHASHSEED": "random"})["PYTHONHASHSEED"] == "17"


def test_a_seed_beyond_32_bits_is_cut_to_what_python_takes() -> None:
    value = variables_of("cpu", 2**32 + 3, {})["PYTHONHASHSEED"]
    shown = [
        subprocess.run(
            [sys.executable, "-c", "print(hash('a text'))"],
            env={**os.environ, "PYTHONHASHSEED": value},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert value == "3"
    assert shown[0] == shown[1]


def test_the_plugin_returns_the_variables_of_its_run() -> None:
    config = RunConfig(
        platform="npu",
        run=RunSection(seed=9),
        model=model_fields(),
        parallel=parallel_fields(),
    )
    result = Deterministic(DeterministicConfig()).ascend_environment(config=config)
    assert result.items() >= {"CLOSE_MATMUL_K_SHIFT": "1"}.items()
    assert "PYTHONHASHSEED" in result


@pytest.mark.parametrize("fills", [False, True])
def test_the_switches_are_on_during_steps_and_restored_afterwards(
    tmp_path: Path, fills: bool
) -> None:
    seen: list[dict[str, Any]] = []
    values = {"enable": ["deterministic"]}
    if fills:
        values["plugins.deterministic.fill_uninitialized_memory"] = True  # type: ignore[assignment]
    before = switches()
    run = train(
        tmp_path, probe("ascend_before_step", lambda self: seen.append(switches())), values=values
    )
    on = {"algorithms": True, "warn only": False, "cudnn": True, "benchmark": False}
    assert seen == [{**on, "mkldnn": True, "fill": fills}]
    assert switches() == before
    assert run.context.models["policy"].transformer_config.deterministic_mode


def test_a_nondeterministic_operation_raises_inside_and_works_after(
    tmp_path: Path,
) -> None:
    before = switches()
    step = probe("ascend_before_step", lambda self: write_in_any_order())
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic"):
        train(tmp_path, step, values={"enable": ["deterministic"]})
    assert switches() == before
    write_in_any_order()


def test_switches_that_were_on_before_the_run_stay_on(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = switches()
        with built(tmp_path, values={"enable": ["deterministic"]}):
            assert switches() != before
        assert switches() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_it_megatron_is_not_in_its_deterministic_mode(tmp_path: Path) -> None:
    with built(tmp_path) as (_, context):
        assert not context.models["policy"].transformer_config.deterministic_mode
        assert not torch.are_deterministic_algorithms_enabled()


def planned_variables(folder: Path, *options: str) -> dict[str, str]:
    words = [
        *("plan", "--json", *options, "data.train=corpus"),
        *("model.num_layers=1", "model.hidden_size=8", "model.num_attention_heads=1"),
        *("model.vocab_size=9", "run.seed=21"),
    ]
    process = subprocess.run(
        [sys.executable, "-m", "ascend_run", *words],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    found: dict[str, str] = json.loads(process.stdout)["environment"]
    return found


def test_plan_shows_the_variables_and_without_it_none(tmp_path: Path) -> None:
    expected = {"PYTHONHASHSEED": "21", "MKL_CBWR": "AUTO,STRICT", "MKL_DYNAMIC": "FALSE"}
    shown = planned_variables(tmp_path, "--enable", "deterministic")
    assert shown.items() >= expected.items()
    assert not expected.keys() & planned_variables(tmp_path).keys()
