"""Parts that are swapped: to files on the CPU, where nothing else frees memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import attrs
import pytest
import torch
from structlog.testing import capture_logs
from torch.multiprocessing.reductions import StorageWeakRef

from ascend_run.ops.transfer.file_copier import FileCopier
from ascend_run.plugins.memory.adaptive_recompute.recorder import Mode
from ascend_run.plugins.memory.adaptive_recompute.treatment import PARTS, Treatment
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from tests.support.small_runs import training

NAME: Final = "adaptive-recompute"
STEPS: Final = 20
DROPOUT: Final = ("model.hidden_dropout", "model.attention_dropout")
MODEL: Final = {
    **DENSE,
    "platform": "cpu",
    "model.num_layers": 4,
    **dict.fromkeys(DROPOUT, 0.1),
    "train.global_batch_size": 2,
}
EVERYTHING: Final = Treatment(swapped=PARTS)
ATTENTION: Final = Treatment(swapped=("self_attention",))
MIXED: Final = Treatment(("input_layernorm", "mlp"), ("self_attention", "pre_mlp_layernorm"))


def swapping(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the model's values, with options of the plugin."""
    own = {"activation_mb": 100.0, "profiled_steps": 1, "min_bytes": 1, "folder": str(folder)}
    return {**MODEL, **{f"plugins.{NAME}.{key}": value for key, value in (own | options).items()}}


@attrs.define
class Ran:
    """What some steps did."""

    losses: list[float]
    weights: list[torch.Tensor]
    sent: int = 0  #: Storages that were copied to files in the last step.
    held: int = 0  #: Those of them that were there after the last layer's forward.
    here: int = 0  #: Bytes that the layers kept then, as the plugin has measured.
    expected: int = 0
    logged: list[dict[str, Any]] = attrs.field(factory=list)


def plain(values: Mapping[str, Any]) -> Ran:
    """Train without the plugin. A rank's job."""
    with training(values, ()) as run:
        losses = [run.step_with_events().loss for _ in range(STEPS)]
        return Ran(losses, [each.cpu().clone() for each in run.parameters.values()])


def forced(values: Mapping[str, Any], treatment: Treatment) -> Ran:
    """Train with a treatment of all layers. A rank's job."""
    sent: list[StorageWeakRef] = []
    to_host = FileCopier.to_host

    def send(copier: FileCopier, tensor: torch.Tensor, out: Any = None) -> torch.Tensor:
        sent.append(StorageWeakRef(tensor.untyped_storage()))
        return to_host(copier, tensor, out)

    with patch.object(FileCopier, "to_host", send), training(values, (NAME,)) as run:
        ran = Ran([], [])
        (plugin,) = (p for p in run.hooks.plugins if p.manifest.name == NAME)
        state: Any = plugin
        tuner = state._tuner
        layers = tuner.recorder.layers
        (last,) = (
            m
            for c in run.bundle.chunks
            for n, m in c.named_modules()
            if n.endswith("final_layernorm")
        )
        last.register_forward_pre_hook(
            lambda *_: setattr(ran, "held", sum(not one.expired() for one in sent))
        )
        for step in range(STEPS):
            sent.clear()
            ran.losses.append(run.step_with_events().loss)
            if step == 0:
                for layer in layers:
                    layer.chosen = treatment
                ran.expected = sum(layer.nbytes[treatment] for layer in layers)
                tuner._decide = lambda _: None
        ran.sent = len(sent)
        ran.weights = [each.cpu().clone() for each in run.parameters.values()]
        tuner.recorder.begin(Mode.LAYERS)
        run.step()
        ran.here = tuner.recorder.peak
        return ran


def chosen(values: Mapping[str, Any]) -> Ran:
    """Train with what the plugin chooses. A rank's job."""
    with training(values, (NAME,)) as run, capture_logs() as events:
        losses = [run.step_with_events().loss for _ in range(STEPS)]
        weights = [each.cpu().clone() for each in run.parameters.values()]
    logged = [dict(event) for event in events if event["event"].startswith(NAME)]
    return Ran(losses, weights, logged=logged)


@pytest.mark.exhaustive(by=lambda treatment: ())
@pytest.mark.parametrize("treatment", [EVERYTHING, ATTENTION, MIXED], ids=lambda one: one.words)
def test_no_bit_changes_and_what_is_swapped_is_freed(
    gloo_pool: GlooPool, tmp_path: Path, treatment: Treatment
) -> None:
    (want,) = gloo_pool.run(plain, 1, MODEL)
    (found,) = gloo_pool.run(forced, 1, swapping(tmp_path), treatment)
    assert found.losses == want.losses
    assert all(map(torch.equal, found.weights, want.weights))
    micro_batches, layers = 2, 4
    of_the_last_layer = found.sent / micro_batches / layers  # whose backward comes at once
    by_the_model = int("input_layernorm" in treatment.swapped)  # the embedding's output
    assert 0 < found.held <= of_the_last_layer + by_the_model
    assert found.here == found.expected


@pytest.mark.exhaustive(by=lambda treatment: ())
@pytest.mark.parametrize("treatment", [EVERYTHING, MIXED], ids=lambda one: one.words)
def test_no_bit_changes_where_experts_are_swapped(
    gloo_pool: GlooPool, tmp_path: Path, treatment: Treatment
) -> None:
    """Each micro-batch has its own routing, so sizes differ from the measured ones."""
    experts = {key: value for key, value in MOE.items() if key.startswith("model.")}
    (want,) = gloo_pool.run(plain, 1, {**MODEL, **experts})
    (found,) = gloo_pool.run(forced, 1, {**swapping(tmp_path), **experts}, treatment)
    assert found.losses == want.losses
    assert all(map(torch.equal, found.weights, want.weights))
    assert 0 < found.held < found.sent / 2


def test_swapped_parts_are_named_in_the_log_and_their_wait_is_the_reason(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """With less than the inputs of the layers as the budget, which recomputation would keep."""
    values = {**swapping(tmp_path, activation_mb=1e-3), **dict.fromkeys(DROPOUT, 0.0)}
    (found,) = gloo_pool.run(chosen, 1, values)
    (want,) = gloo_pool.run(plain, 1, {**MODEL, **dict.fromkeys(DROPOUT, 0.0)})
    assert found.losses == want.losses
    assert all(map(torch.equal, found.weights, want.weights))
    chose, measured = found.logged
    assert {*chose["layers"].values()} == {EVERYTHING.words}
    assert measured["bytes"] == measured["expected_bytes"] == chose["expected_bytes"] == 0
    assert {*chose["link"]} == {"to_host_gb", "to_device_gb"}
    assert min(chose["link"].values()) > 0
    (kind,) = chose["measured"]
    assert kind["choices"][EVERYTHING.words]["milliseconds"] > 0


def test_on_the_cpu_nothing_is_swapped_without_a_folder(gloo_pool: GlooPool) -> None:
    values = {key: value for key, value in swapping(Path()).items() if "folder" not in key}
    (found,) = gloo_pool.run(chosen, 1, {**values, f"plugins.{NAME}.activation_mb": 1e-3})
    chose, over, _ = found.logged
    assert {*chose["layers"].values()} == {"layer"}
    assert over["event"] == f"{NAME}.over_budget"
    assert chose["link"] == {}
