"""The dtype of bfloat16 matmuls: chosen by given times, never measured here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import distributed as dist

from ascend_run.plugin_api import AttentionSpec, Mask
from ascend_run.plugins.platforms.cpu import Cpu
from ascend_run.plugins.platforms.cpu.attention import FusedCpuAttention
from ascend_run.plugins.platforms.cpu.kept_times import Times
from ascend_run.plugins.platforms.cpu.options import BF16_MATMUL_DTYPE, CpuOptions
from ascend_run.plugins.platforms.cpu.timed_choices import ATTENTION, LINEARS, Work, agreed_choice
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.parity import TRIAL_SECONDS
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from tests.support.costs import planned
from tests.support.needed_plugins import case
from tests.support.tiny_configs import config_with

BOTH_IN_FP32 = {
    "plugins.cpu.bf16_matmul_dtype": "fp32",
    "plugins.cpu.bf16_attention_dtype": "fp32",
}
FASTER_BF16, FASTER_FP32 = Times(usual=1.0, other=4.0), Times(usual=4.0, other=1.0)


class Clock:
    """Given times, and how often they were read."""

    def __init__(self, times: Times = FASTER_FP32) -> None:
        self.times, self.asked = times, 0

    def __call__(self) -> Times:
        self.asked += 1
        return self.times


def chosen(value: str, clock: Clock, like: Work = LINEARS) -> str:
    return agreed_choice(value, Work(like.option, clock))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty cache, and unset the variable that overrides it."""
    monkeypatch.delenv(BF16_MATMUL_DTYPE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ascend-run"


@pytest.mark.parametrize(
    ("times", "dtype"),
    [(FASTER_BF16, "bf16"), (FASTER_FP32, "fp32"), (Times(usual=1.0, other=0.95), "bf16")],
    ids=str,
)
@pytest.mark.usefixtures("cache")
def test_the_faster_one_is_chosen_and_a_tie_changes_nothing(times: Times, dtype: str) -> None:
    assert chosen("auto", Clock(times)) == dtype


def test_a_processor_is_measured_once(cache: Path) -> None:
    first, second = Clock(), Clock(FASTER_BF16)
    assert [chosen("auto", clock) for clock in (first, second)] == ["fp32", "fp32"]
    assert (first.asked, second.asked) == (1, 0)
    assert len(list(cache.iterdir())) == 1


def test_attention_has_its_own_choice(cache: Path) -> None:
    linears, attention = Clock(FASTER_BF16), Clock(FASTER_FP32)
    assert chosen("auto", linears) == "bf16"
    assert [chosen("auto", attention, ATTENTION) for _ in range(2)] == ["fp32", "fp32"]
    assert chosen("auto", linears) == "bf16"
    assert (linears.asked, attention.asked) == (1, 1)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.usefixtures("cache")
def test_fewer_instructions_are_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("auto", Clock()) == "fp32"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert chosen("auto", Clock(FASTER_BF16)) == "bf16"


@pytest.mark.parametrize(
    ("option", "precision", "choices"),
    [
        ("auto", "bf16", BOTH_IN_FP32),
        ("bf16", "bf16", {**BOTH_IN_FP32, "plugins.cpu.bf16_matmul_dtype": "bf16"}),
        ("auto", "fp32", {"plugins.cpu.fp32_matmul_library": "torch"}),
    ],
)
def test_the_choice_is_named_as_the_option_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, option: str, precision: str, choices: dict[str, str]
) -> None:
    monkeypatch.setenv(BF16_MATMUL_DTYPE, "fp32")
    config = config_with(train__precision=precision)
    assert Cpu(CpuOptions(bf16_matmul_dtype=option)).ascend_machine_choices(config) == choices


def changed(**values: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **values})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-7],
        lambda text: "[]",
        lambda text: text.replace("4.0", "9.0"),
        changed(checksum=""),
        changed(key={"torch": "another"}),
        changed(seconds=None),
    ],
    ids=["cut", "list", "number", "checksum", "key", "nothing"],
)
def test_a_damaged_record_is_measured_again(cache: Path, damage: Callable[[str], str]) -> None:
    chosen("auto", Clock())
    (record,) = cache.iterdir()
    record.write_text(damage(record.read_text()))
    clock = Clock(FASTER_BF16)
    assert chosen("auto", clock) == "bf16"
    assert clock.asked == 1
    assert chosen("auto", Clock()) == "bf16"  # recovered


def test_an_unwritable_cache_warns(cache: Path) -> None:
    cache.write_text("a file in its place")
    clock = Clock()
    with capture_logs() as logs:
        assert [chosen("auto", clock) for _ in range(2)] == ["fp32", "fp32"]
    assert clock.asked == 2
    (told, *_) = [log for log in logs if log["event"] == "cpu.bf16_matmul_dtype_not_kept"]
    assert "plugins.cpu.bf16_matmul_dtype" in told["fix"]


@pytest.mark.usefixtures("cache")
def test_no_clock_is_asked_where_something_else_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    assert [chosen(option, clock) for option in ("bf16", "fp32")] == ["bf16", "fp32"]
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen("auto", clock) == "bf16"
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv(BF16_MATMUL_DTYPE, "fp32")
    assert chosen("auto", clock) == "fp32"
    assert clock.asked == 0


def test_a_variable_of_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Cpu(CpuOptions())
    monkeypatch.setenv(BF16_MATMUL_DTYPE, "fp16")
    (problem,) = cpu.ascend_check()
    assert f"{BF16_MATMUL_DTYPE}='fp16'; expected bf16 or fp32" in problem
    monkeypatch.setenv(BF16_MATMUL_DTYPE, "fp32")
    assert not cpu.ascend_check()


def chosen_by_rank(folder: str) -> tuple[str, int]:
    """Each rank would choose differently; the last rank's clock must not be read."""
    clock = Clock(FASTER_FP32 if dist.get_rank() == 0 else FASTER_BF16)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(BF16_MATMUL_DTYPE, raising=False)
        patch.setenv("XDG_CACHE_HOME", folder)
        return chosen("auto", clock), clock.asked


def test_every_rank_takes_what_rank_0_has_chosen(gloo_pool: GlooPool, tmp_path: Path) -> None:
    assert gloo_pool.run(chosen_by_rank, 2, str(tmp_path)) == [("fp32", 1), ("fp32", 0)]


TP = {"parallel.tensor_model_parallel_size": 2}


@pytest.mark.exhaustive(by=lambda plugins, layout: ["a plugin"] if plugins else [*layout])
@pytest.mark.parametrize(
    ("plugins", "model", "layout"),
    [
        ((), DENSE, {}),
        ((), DENSE, TP),
        ((), DENSE, {**TP, "parallel.sequence_parallel": True}),
        ((), MOE, {}),
        case(("matmul-add",), DENSE, {}),
        case(("lora",), DENSE, {"plugins.lora.export": False}),
        case(("mc2",), DENSE, {**TP, "parallel.sequence_parallel": True}),
        case(("coc",), DENSE, TP),
        case(("coc",), DENSE, {**TP, "parallel.sequence_parallel": True}),
        case(("gmm",), MOE, {}),
        case(("compile",), DENSE, {"plugins.compile.regions": "parts"}),
    ],
    ids=str,
)
def test_a_model_is_as_near_to_float64_as_with_bf16_matmuls(
    gloo_pool: GlooPool, plugins: tuple[str, ...], model: dict[str, Any], layout: dict[str, Any]
) -> None:
    ranks = 2 if TP.items() <= layout.items() else 1

    copies = {}

    def gradients(dtype: str, products: str) -> dict[str, torch.Tensor]:
        config = {**model, **layout, **dict.fromkeys(BOTH_IN_FP32, products), "platform": "cpu"}
        if dtype != "float64":
            config["train.precision"] = "bf16"
        trial = Trial(plugins=plugins, config=config, dtype=dtype)
        outcome = gloo_pool.run(run_trial, ranks, trial, timeout=TRIAL_SECONDS)[0]
        copies[dtype, products] = outcome.operations.get("_to_copy", 0)
        return {p.name: p.tensor.double() for p in outcome.shards if p.tensor is not None}

    exact = gradients("float64", "bf16")
    plain, wide = gradients("bfloat16", "bf16"), gradients("bfloat16", "fp32")

    def error(found: dict[str, torch.Tensor]) -> float:
        """Return the relative error over all tensors."""
        apart = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
        return (apart / sum(float(tensor.square().sum()) for tensor in exact.values())) ** 0.5

    assert exact.keys() == plain.keys() == wide.keys()
    assert 0 < error(wide) <= 1.25 * error(plain)
    if "compile" not in plugins:  # operations in a graph are not counted
        assert copies["bfloat16", "fp32"] > copies["bfloat16", "bf16"]


@pytest.mark.parametrize(
    ("option", "where_the_peak_is"),
    [
        ("plugins.cpu.bf16_matmul_dtype", {"model.ffn_hidden_size": 256}),
        ("plugins.cpu.bf16_attention_dtype", {"model.kv_channels": 64}),
    ],
)
@pytest.mark.parametrize(
    ("products", "precision", "counted"),
    [("fp32", "bf16", True), ("auto", "bf16", False), ("fp32", "fp32", False)],
)
def test_wide_copies_are_counted_where_they_are_sure(
    products: str,
    precision: str,
    counted: bool,
    option: str,
    where_the_peak_is: dict[str, int],
) -> None:
    long = {"data.seq_length": 256, "train.precision": precision}
    config = {**DENSE, **long, **where_the_peak_is}
    (plain,) = planned({**config, option: "bf16"})[1]
    (cost,) = planned({**config, option: products})[1]
    assert (cost.memory.peak > plain.memory.peak) is counted


@pytest.mark.parametrize("window", [None, (40, 0)], ids=["causal", "window"])
def test_a_wide_backward_is_rounded_once(window: tuple[int, int] | None) -> None:
    """The forward has the same bits, and gradients are those of the float32 kernel, rounded."""
    draw = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(300, 2, 4, 16, generator=draw).bfloat16() for _ in range(4))
    spec = AttentionSpec(scale=0.25, mask=Mask(window=window))
    plain, wide = FusedCpuAttention(), FusedCpuAttention(wide_backward=True)
    out, lse, saved = wide.forward(q, k, v, spec)
    for mine, theirs in zip((out, lse), plain.forward(q, k, v, spec)[:2], strict=True):
        assert torch.equal(mine, theirs)
    found = wide.backward(dout, q, k, v, out, lse, saved, spec)
    floats = [x.float() for x in (dout, q, k, v, out)]
    expected = plain.backward(*floats, lse, saved, spec)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs.bfloat16())
    rounded = plain.backward(dout, q, k, v, out, lse, saved, spec)
    assert not all(torch.equal(mine, theirs) for mine, theirs in zip(found, rounded, strict=True))
