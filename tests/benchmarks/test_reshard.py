"""The campaign ``reshard``: each feature resumes in other layouts, the committed result is of all
cases and passes, and what is lost on the way is found."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import pytest
import torch
from torch import Tensor

from ascend_run.testing.pool import GlooPool
from benchmarks.campaigns import reshard, resharded_runs
from benchmarks.campaigns.campaign import PASSED, digest, is_full, read_result
from benchmarks.campaigns.features import LAYOUTS
from benchmarks.campaigns.resharded_runs import (
    LAST,
    SAVED,
    Resharded,
    changes,
    departures,
    lost,
)
from benchmarks.campaigns.run_states import RankState, RunState, states_of_run
from benchmarks.campaigns.seeded_bugs.mutation import mutated

RESULT = read_result(reshard.CAMPAIGN.name)
FIGURES = RESULT["figures"]
FEATURES = FIGURES["cases of each feature"]
needs_every_feature = pytest.mark.needs_plugins(*(n for n in FEATURES if n != reshard.NONE))


@functools.cache
def cases() -> list[str]:
    """Return all cases; building them reads all manifests, so not while tests are collected."""
    return [*reshard.cases(reshard.CAMPAIGN.seed)]


@needs_every_feature
def test_the_committed_result_is_of_all_cases_and_passes() -> None:
    assert is_full(reshard.CAMPAIGN, RESULT)
    assert RESULT["counts"] == {PASSED: RESULT["cases"]}
    assert {*FEATURES} == {*reshard.subjects()}
    counted = FIGURES["compared"] + FIGURES["of an idle feature"] + sum(FIGURES["refused"].values())
    assert counted == RESULT["cases"]


def test_every_feature_was_compared_in_every_precision_but_these() -> None:
    every = {"fp32", "bf16", "fp16"}
    missing = {name: every - {*precisions} for name, precisions in FEATURES.items()}
    assert {name: left for name, left in missing.items() if left} == {
        "reuse-fp32-param": {"fp32", "fp16"},  # it is idle in the first and refuses the other
    }


def axes_changed(asked: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return what a run of a case leaves and enters."""
    begun, resumed = (asked[side]["layout"] for side in ("begun", "resumed"))
    changed = {axis for axis in {*begun, *resumed} if begun.get(axis, 1) != resumed.get(axis, 1)}
    return {
        (verb, axis)
        for axis in changed
        for verb, sizes in (("left", begun), ("entered", resumed))
        if axis in sizes
    }


EVERY: Final = {
    (verb, axis)
    for verb in ("left", "entered")
    for axis in {*reshard.EXPERT_TP, *(axis for _, layout in LAYOUTS for axis in layout)}
}


@needs_every_feature
def test_every_axis_is_left_and_entered_by_every_feature() -> None:
    outcomes = {
        name: group["outcome"] for group in RESULT["records"] for name in group["cases"].split()
    }
    compared: dict[str, set[tuple[str, str]]] = {name: set() for name in FEATURES}
    for asked in map(json.loads, cases()):
        if outcomes[digest(json.dumps(asked, sort_keys=True))].get("compared"):
            compared[asked["plugin"]] |= axes_changed(asked)
    assert {name: EVERY - found for name, found in compared.items() if EVERY - found} == {}


@needs_every_feature
def test_cases_without_trained_values_are_listed_and_have_others() -> None:
    listed = FIGURES["values only as loaded, for experts in half precision"]
    of_cases = Counter(
        asked["plugin"]
        for asked in map(json.loads, cases())
        if asked["model"] == "moe" and asked["values"]["train.precision"] != "fp32"
        if not reshard.is_bitwise(asked["plugin"])
    )
    assert listed == of_cases
    assert all(FEATURES[name].get("fp32") for name in listed)


def test_what_was_refused_says_why() -> None:
    (row,) = FIGURES["refused"]
    assert row.startswith("recompute-activation: recompute-activation: with its options it treats")


@attrs.frozen
class Faulty:
    """A pool on which runs that load a checkpoint have a fault."""

    pool: GlooPool
    fault: tuple[str, str, str]

    def run(
        self, job: Callable[..., Any], size: int, *given: Any, timeout: float
    ) -> list[Mapping[int, RankState]]:
        if "checkpoint.load" not in given[1]["values"]:
            return self.pool.run(job, size, *given, timeout=timeout)
        return self.pool.run(faulty, size, *given, *self.fault, timeout=timeout)


def faulty(folder: Any, asked: Mapping[str, Any], *fault: str) -> Mapping[int, RankState]:
    """A job: a run with other code."""
    with mutated(*fault):
        return states_of_run(folder, asked)


COPY: Final = "shard.tensor[shared.slices_in(shard_box(shard))].copy_(part)"


@pytest.mark.exhaustive(by=lambda fault: ())
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (
            (
                "ascend_run.core.checkpoint.loading:fill",
                COPY,
                COPY.replace("part", "part.flip(0) if '/exp_avg/' in shard.key else part"),
            ),
            "loaded: optimizer/exp_avg/decoder.final_layernorm.weight differs",
        ),
        (
            (
                "ascend_run.core.checkpoint.loading:fill",
                COPY,
                f"{COPY} if '/step/' not in shard.key else None",
            ),
            "loaded: optimizer/step/decoder.final_layernorm.weight differs",
        ),
        (
            (
                "ascend_run.core.checkpoint.entries:Progress.load_state_dict",
                "self._scheduler.step(progress.schedule_steps - self._scheduler.num_steps)",
                "pass",
            ),
            "loaded: 'progress' is",
        ),
        (
            (
                "ascend_run.core.train.checkpointing:Checkpoints._load",
                "entries.restore(values)",
                "entries.restore(values); __import__('torch').rand(1)",
            ),
            "loaded, against a run that begins: rng/rank_00000/torch differs",
        ),
        (
            (
                "ascend_run.core.train.data:open_batches",
                "first = context.consumed_samples",
                "first = 0",
            ),
            "step 3: 'batch' is",
        ),
    ],
    ids=["a state in another order", "a step count", "the schedule", "a generator", "the data"],
)
def test_what_is_lost_on_the_way_is_found(
    monkeypatch: pytest.MonkeyPatch, gloo_pool: GlooPool, fault: tuple[str, str, str], found: str
) -> None:
    case = cases()[0]
    monkeypatch.setattr(resharded_runs, "pool", lambda: Faulty(gloo_pool, fault))
    outcome = reshard.run(case)
    assert outcome["verdict"] == "differs"
    assert any(problem.startswith(found) for problem in outcome["all"]), outcome["all"]


def held(**changed: Tensor) -> RunState:
    """Return a state of a run."""
    tensors = {"model/w": torch.ones(4), "optimizer/exp_avg/w": torch.ones(4), **changed}
    return RunState(tensors, (), {"rng/rank_00000/torch": torch.ones(2)}, {"progress": {"step": 2}})


def runs(**changed: Any) -> Resharded:
    """Return two runs that agree."""
    states = {SAVED: held(), LAST: held()}
    steps = [{"step": 3, "loss": 2.0, "lr": 0.1}, {"step": 4, "loss": 1.0, "lr": 0.1}]
    both = {"begun": states, "resumed": states, "steps": steps, "resumed_steps": steps}
    return Resharded(**{**both, "resumed_at": [SAVED], "reinitialized": [["rng"]] * 2, **changed})


NEAR: Final = torch.ones(4) + 1e-7


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"resumed": {SAVED: held(**{"model/w": NEAR})}}, "loaded: model/w differs"),
        ({"resumed": {SAVED: held(**{"model/w": torch.ones(4).double()})}}, "model/w differs"),
        ({"resumed": {SAVED: held(**{"ema/w": NEAR})}}, "ema/w is of one run only"),
        (
            {"resumed": {SAVED: attrs.evolve(held(), values={"progress": {"step": 0}})}},
            "'progress' is {'step': 0}",
        ),
        ({"resumed": {SAVED: attrs.evolve(held(), problems=("a replica",))}}, "loaded: a replica"),
        ({"resumed_at": []}, "resumed at []"),
        ({"reinitialized": []}, "the log says that []"),
        ({"reinitialized": [["rng"], ["averages", "rng"]]}, "['averages', 'rng']"),
    ],
    ids=["bit", "dtype", "extra", "value", "replica", "no checkpoint", "no log", "an entry"],
)
def test_one_lost_bit_is_a_message(changed: Mapping[str, Any], said: str) -> None:
    (problem,) = lost(runs(**changed))
    assert said in problem
    assert not [*lost(runs())]


def parted(found: Resharded, **more: Any) -> list[str]:
    options = {"plugin": "muon", "half": False, "experts": False, **more}
    return [*departures(found, **options)]


def ended(by: float, key: str) -> Mapping[str, Any]:
    return {"resumed": {LAST: held(**{key: torch.ones(4) + by})}}


OF_EXPERTS: Final = {"half": True, "experts": True}


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        (ended(1.1e-5, "model/w"), {}, "model/w has max error"),
        (ended(1.1e-5, "optimizer/exp_avg/w"), {}, "optimizer/exp_avg/w has max error"),
        (ended(9e-3, "model/w"), {"half": True}, "model/w has max error"),
        (ended(7e-2, "optimizer/exp_avg/w"), {"half": True}, "exp_avg/w has max error"),
        (
            ended(1.7e-2, "optimizer/exp_avg/w"),
            {"plugin": "o2-bf16-optimizer"},
            "exp_avg/w has max error",
        ),
        (
            {"resumed_steps": [{"step": 3, "loss": 2.1, "lr": 0.1}, runs().steps[1]]},
            {},
            "step 3: 'loss' is 2.1, not 2.0",
        ),
        (
            {"resumed_steps": [{"step": 3, "loss": 2.0, "lr": 0.1 + 1e-9}, runs().steps[1]]},
            {"half": True},
            "step 3: 'lr' is",
        ),
        (
            {"resumed": {LAST: attrs.evolve(held(), values={"progress": {"step": 3}})}},
            OF_EXPERTS,
            "'progress' is {'step': 3}",
        ),
        (
            {"resumed_steps": [{"step": 3, "loss": 2.1, "lr": 0.1 + 1e-9}, runs().steps[1]]},
            OF_EXPERTS,
            "step 3: 'lr' is",
        ),
        (
            {"resumed_steps": [{"step": 3, "lr": 0.1}, runs().steps[1]]},
            OF_EXPERTS,
            "'loss' is None",
        ),
        (
            {"resumed": {LAST: held(**{"model/w": torch.ones(4).double()})}},
            OF_EXPERTS,
            "model/w is ((4,), torch.float64)",
        ),
        ({"resumed": {LAST: held(**{"ema/w": torch.ones(4)})}}, OF_EXPERTS, "not None"),
        (ended(float("nan"), "model/w"), OF_EXPERTS, "model/w is not finite"),
    ],
    ids=[
        *("weight", "moment", "half", "half moment", "rounded", "loss", "exact", "experts"),
        *("of experts: rate", "no loss", "dtype", "no moment", "not finite"),
    ],
)
def test_a_departure_above_the_tolerance_is_a_message(
    changed: Mapping[str, Any], options: Mapping[str, Any], said: str
) -> None:
    (problem,) = parted(runs(**changed), **options)
    assert said in problem
    assert not parted(runs(**ended(0.9e-5, "model/w")))
    assert not parted(runs(), **options)


def test_values_of_experts_in_half_precision_may_part() -> None:
    steps = [{"step": 3, "loss": 2.2, "lr": 0.1}, {"step": 4, "loss": 1.2, "lr": 0.1}]
    parts = runs(**ended(0.5, "model/w"), resumed_steps=steps)
    assert not parted(parts, **OF_EXPERTS)
    assert parted(parts, half=True)


def test_steps_without_a_change_show_nothing() -> None:
    still = [{"step": 3, "loss": 2.0}, {"step": 4, "loss": 2.0}]
    assert parted(runs(steps=still, resumed_steps=still)) == [
        "the loss stands still, so the steps show nothing"
    ]


@pytest.mark.parametrize("step", [SAVED, LAST])
@pytest.mark.parametrize("side", ["begun", "resumed"])
def test_a_bit_that_a_feature_changes_is_a_message(side: str, step: int) -> None:
    states = {SAVED: held(), LAST: held(), step: held(**{"model/w": NEAR})}
    (problem,) = changes(runs(**{side: states}), runs())
    assert problem == f"{side}, step {step}: model/w differs"
    assert not [*changes(runs(), runs())]
