"""What Megatron refuses is known before ranks exist, and costs no memory to find out."""

from __future__ import annotations

import json
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch.distributed as dist

from ascend_run.entrypoints.cli import run
from ascend_run.plugin_api import ConfigError, PlatformError
from ascend_run.prepare.prepare import prepare

DEMO = Path(__file__).parents[3] / "examples/demo.toml"
pytestmark = pytest.mark.needs_plugins("gmm", "mixtral", "swap-attention", "ulysses", "noop-layers")
"""Of the demo; the models here have two of its layers more."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own, of what it does without
        yield


def build(*overrides: str, **asked: object) -> int:
    from ascend_run.tools.plan.trial_build import trial_build

    prepared = prepare(DEMO, ("model.num_layers=4", *overrides), **asked)  # type: ignore[arg-type]
    return trial_build(prepared.config, prepared.instances(), prepared.layout.world_size)


def test_one_layer_of_each_kind_is_built_on_no_process_group() -> None:
    assert build() == 1
    assert build("model.moe_layer_freq=[0,1,0,1]") == 2
    assert build("plugins.noop-layers.layers=[0]", enable=["noop-layers", "ulysses"]) == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "stages",
    [
        ("model.pipeline_model_parallel_layout=Et|tttL",),
        ("model.pipeline_model_parallel_layout=Et|t|t|tL",),
        ("parallel.virtual_pipeline_model_parallel_size=2",),
    ],
)
def test_layers_are_built_for_any_pipeline_layout(stages: tuple[str, ...]) -> None:
    """Also where Megatron asks for the stage or for the virtual stage of a layer."""
    from megatron.core import parallel_state

    ranks = ("run.nproc=4", "parallel.pipeline_model_parallel_size=2")
    batches = ("train.micro_batch_size=1", "train.global_batch_size=16")
    assert build(*ranks, *batches, *stages, "model.moe_layer_freq=[0,1,0,1]") == 2
    with pytest.raises(AssertionError, match="not initialized"):
        parallel_state.get_pipeline_model_parallel_rank()


def test_a_layer_of_a_terabyte_takes_no_memory() -> None:
    widths = ("model.hidden_size=65536", "model.moe_ffn_hidden_size=524288")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert build(*widths) == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_the_choices_of_a_run_are_not_in_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--config", str(DEMO), "--build", "--json"]) == 0
    assert "plugins" in json.loads(capsys.readouterr().out)


def test_what_megatron_s_config_refuses_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (
        "model.recompute_granularity=selective",
        'model.recompute_modules=["nonsense"]',
    )
    words = ["plan", "--config", str(DEMO), "--disable", "swap-attention", *wrong]
    assert run(words) == 0, "no check sees it"
    assert run([*words, "--build"]) == 2

    shown = capsys.readouterr().err
    assert shown.startswith("error: Megatron rejects this model:\n")
    assert "nonsense" in shown
    assert "Traceback" not in shown


def test_what_a_module_of_megatron_refuses_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import moe_layer

    def refuse(self: object, *arguments: object, **named: object) -> None:
        raise AssertionError("experts must be an even number")

    as_megatrons = FunctionType(refuse.__code__, vars(moe_layer))
    monkeypatch.setattr(moe_layer.MoELayer, "__init__", as_megatrons)
    with pytest.raises(ConfigError) as refused:
        build()
    assert refused.value.headline == "Megatron rejects this model"
    assert refused.value.problems[0].startswith("experts must be an even number when instantiating")


def test_an_error_of_ours_is_a_bug_and_not_megatron_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also below a frame of Megatron, which builds our modules."""
    from ascend_run.core.model.attention import CoreAttention

    def fail(self: object, *arguments: object, **named: object) -> None:
        raise ValueError("ours")

    monkeypatch.setattr(CoreAttention, "__init__", fail)
    with pytest.raises(ValueError, match="ours"):
        build()


def test_the_device_is_left_as_it_was() -> None:
    import torch

    before = torch.cuda.current_device
    with pytest.raises((ConfigError, PlatformError)):
        build("model.recompute_granularity=selective", 'model.recompute_modules=["nonsense"]')
    assert torch.cuda.current_device is before
