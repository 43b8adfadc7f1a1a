"""Steps that are tried again after out-of-memory, against runs in which memory never runs out."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ascend_run.core.train.retries import MOST_TRIES
from ascend_run.core.train.seeding import random_state
from ascend_run.plugin_api import ForwardLink, RunPhase
from ascend_run.testing.models import DENSE
from ascend_run.testing.pool import GlooPool
from tests.support.probed_runs import Run, probe, train
from tests.support.small_runs import training

HOOK: Final = "ascend_out_of_memory"
STEPS: Final = {"train.train_iters": 3, "train.global_batch_size": 2}
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
BALANCED: Final = {
    "model.moe_router_enable_expert_bias": True,
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_bias_update_rate": 0.01,
}
BUFFERED: Final = {"train.precision": "bf16"}
"""Gradients are added up in Megatron's buffers, in fp32."""
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "dense": DROPOUT | BUFFERED,
    "moe": DROPOUT | BALANCED,
}


@pytest.fixture(autouse=True)
def only_own_garbage() -> None:
    """Each failed try collects garbage: up to a second where earlier tests have left much."""
    gc.collect()
    gc.freeze()


@attrs.define
class Policy:
    """What the last layer does in training: its output is halved in half of the steps, and memory
    runs out in some of its forwards, counted from 1, or in the backwards of these."""

    fails: frozenset[int] = frozenset()
    where: str = "forward"
    halves: bool = False
    forwards: int = 0
    asked: int = 0
    freed: list[bool] = attrs.field(factory=list)
    """Whether what a failed try held was freed each time that it was asked to make room."""
    _held: list[StorageWeakRef] = attrs.field(factory=list)

    def probe(self) -> Any:
        link = ForwardLink(wrap=self._wrap, compilable=False)

        def of_last(self: Any, layer_index: int) -> Any:
            return (lambda layer: link) if layer_index == 1 else None

        return probe("ascend_layer", of_last, "policy")

    def _wrap(self, inner: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            out, *rest = inner(*args, **kwargs)
            if not torch.is_grad_enabled():
                return out, *rest
            self.forwards += 1
            if self.forwards in self.fails:
                self._held.append(StorageWeakRef(out.untyped_storage()))
                if self.where == "forward":
                    self._run_out()
                kwargs["hidden_states"].register_hook(self._run_out)
            return out * 0.5 if self.halves else out * 1.0, *rest

        return forward

    def _run_out(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("on purpose")

    def room_maker(self, verdict: bool = True, name: str = "room-maker") -> Any:
        def make_room() -> bool:
            self.asked += 1
            self.freed.append(all(storage.expired() for storage in self._held))
            self.halves = self.halves or verdict
            return verdict

        return probe(HOOK, lambda self: make_room, name)


def outcome(run: Run, states: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What must be equal in every bit: logged metrics, fingerprints, weights, generators."""
    text = (run.folder / "run/fingerprint.jsonl").read_text()
    machine = ("seconds", "per_second", "memory", "time")

    def exact(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in line.items() if not any(x in name for x in machine)}
            for line in lines
        ]

    return {
        "metrics": exact(run.lines()),
        "fingerprints": exact([json.loads(line) for line in text.splitlines()]),
        "weights": {name: weight.clone() for name, weight in run.weights.items()},
        "buffers": {name: value.clone() for name, value in run.model.named_buffers()},
        "generators": {**states},
    }


def trained(folder: Path, *probes: Any, **options: Any) -> dict[str, Any]:
    states: dict[str, torch.Tensor] = {}
    end = probe("ascend_after_run", lambda self: states.update(random_state().state_dict()), "end")
    return outcome(train(folder, *probes, end, **options), states)


def assert_equal(got: Any, want: Any, where: str = "") -> None:
    assert type(got) is type(want), where
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want), where
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for name, value in want.items():
            assert_equal(got[name], value, f"{where}/{name}")
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for at, value in enumerate(want):
            assert_equal(got[at], value, f"{where}/{at}")
    else:
        assert got == want, where


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_tried_again_is_the_step_of_the_changed_policy(
    tmp_path: Path, where: str, model: str
) -> None:
    """Memory runs out in the second micro-batch of the second step, and in the first one of its
    next try."""
    values = {**STEPS, **MODELS[model]}
    tight, steps = Policy(fails=frozenset({4, 5}), where=where), []
    count = probe("ascend_before_step", lambda self, context: steps.append(context.step), "counts")
    got = trained(
        tmp_path / "tight", tight.probe(), tight.room_maker(), count, values=values, model=model
    )

    def change(self: Any, context: Any) -> None:
        ample.halves = context.step >= 1

    ample = Policy()
    changed = probe("ascend_before_step", change, "changes")
    want = trained(tmp_path / "ample", ample.probe(), changed, values=values, model=model)

    assert_equal(got, want)
    assert tight.freed == [True, True]
    assert steps == [0, 1, 1, 1, 2]
    if model == "moe":
        assert any("expert_load" in line for line in want["metrics"])
        assert any(value.any() for name, value in want["buffers"].items() if "expert_bias" in name)


def test_plugins_are_called_until_one_makes_room(tmp_path: Path) -> None:
    tight, spare = Policy(fails=frozenset({1})), Policy()
    unable = tight.room_maker(verdict=False, name="unable")
    train(tmp_path, tight.probe(), unable, spare.room_maker(), Policy().room_maker(name="last"))
    assert (tight.asked, spare.asked) == (1, 1)


def test_without_a_verdict_the_error_is_raised_as_it_is(tmp_path: Path) -> None:
    tight = Policy(fails=frozenset({1}))
    with pytest.raises(torch.OutOfMemoryError, match="on purpose") as error:
        train(tmp_path, tight.probe(), tight.room_maker(verdict=False))
    assert error.traceback[-1].name == "_run_out"
    assert tight.freed == [True]


def test_tries_have_a_bound(tmp_path: Path) -> None:
    tight = Policy(fails=frozenset(range(1, 100)))
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        train(tmp_path, tight.probe(), tight.room_maker())
    assert (tight.forwards, tight.asked) == (MOST_TRIES, MOST_TRIES - 1)


def fails_in(where: RunPhase) -> Any:
    """A probe that runs out of memory where a phase begins."""

    def scope() -> NoReturn:
        raise torch.OutOfMemoryError("on purpose")

    return probe("ascend_phase", lambda self, phase: scope if phase is where else None, "fails")


def test_once_the_optimizer_has_begun_the_error_is_raised(tmp_path: Path) -> None:
    other = Policy()
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        train(tmp_path, fails_in(RunPhase.UPDATE), other.room_maker())
    assert other.asked == 0


def test_reductions_that_backward_has_started_are_not_started_again(tmp_path: Path) -> None:
    tight = Policy(fails=frozenset({1}), where="backward")
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        train(tmp_path, tight.probe(), tight.room_maker(), values={"ddp.overlap_grad_reduce": True})
    assert tight.asked == 0


def asked_of_two_ranks() -> int:
    """A rank's job: how often its plugins are asked to free memory if both ranks run out of it."""
    tight = Policy(fails=frozenset({1}))
    with (
        training(DENSE, (), tight.probe(), tight.room_maker()) as run,
        pytest.raises(torch.OutOfMemoryError, match="on purpose"),
    ):
        run.step()
    return tight.asked


def test_on_several_ranks_the_error_is_raised(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(asked_of_two_ranks, 2) == [0, 0]
