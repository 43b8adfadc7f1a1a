"""The campaign ``bitwise``: every feature and pair is compared in every layout, the committed
result is of all cases and passes, and what changes a bit is found."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, Final

import attrs
import pytest
import torch

from ascend_run.plugin_api import AscendRunError
from ascend_run.registry.resolution import resolve
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import RankOutcome, Shard, Trial
from benchmarks.campaigns import bitwise
from benchmarks.campaigns.campaign import PASSED, digest, is_full, read_result, result_path
from benchmarks.campaigns.feature_sets import sets_of
from benchmarks.campaigns.features import EXCHANGE, LAYOUTS, catalogue
from benchmarks.campaigns.seeded_bugs.mutation import mutated
from benchmarks.campaigns.set_cases import case_of, cases_of
from benchmarks.campaigns.setting import Setting
from benchmarks.campaigns.trained_ranks import Trained, differences, emptiness, trained

RESULT = read_result(bitwise.CAMPAIGN.name)
FIGURES = RESULT["figures"]
FEATURES = FIGURES["features"]
EFFECTS: Final = {
    "adaptive-recompute": "matmuls",
    "moe-adaptive-recompute": "matmuls",
    "moe-zero-memory": "matmuls",
    "recompute": "matmuls",
    "recompute-activation": "activations",
    "recompute-in-advance": "recompute-in-advance/ahead",
    "recompute-in-bubble": "matmuls",
    "recompute-norm": "norms",
    "reuse-fp32-param": "updates",  # of one bucket of master weights each
    "smart-swap": "freed storages",
    "swap-attention": "swap-attention/swap_bytes",
    "swap-optimizer": "copies",
    "virtual-optimizer": "bytes in files",
}
"""Feature -> what it adds to a step."""
LESS: Final = {"recompute-comm-opt": "collectives"}
"""Feature -> what a step has less of with it."""
SETTINGS: Final = [(p, index) for p in bitwise.PRECISIONS for index in range(2 * len(LAYOUTS))]


@functools.cache
def cases() -> list[dict[str, Any]]:
    """Return all cases; building them takes seconds, so not while tests are collected."""
    return [json.loads(case) for case in bitwise.cases(bitwise.CAMPAIGN.seed)]


@pytest.mark.needs_plugins(*FEATURES, EXCHANGE)  # of layouts that split the sequence
def test_the_committed_result_is_of_all_cases_and_passes() -> None:
    assert is_full(bitwise.CAMPAIGN, RESULT)
    assert RESULT["counts"] == {PASSED: RESULT["cases"]}
    assert bitwise.memory_features() == FEATURES
    names = [name for group in RESULT["records"] for name in group["cases"].split()]
    assert Counter(names) == Counter(map(digest, bitwise.cases(bitwise.CAMPAIGN.seed)))
    assert result_path(bitwise.CAMPAIGN.name).stat().st_size < 200_000


def test_every_feature_was_seen_to_do_its_work() -> None:
    added = FIGURES["added to one step by each feature, over its cases"]
    assert {*added} == {*FEATURES}
    for name in FEATURES:
        if name in LESS:
            assert added[name][LESS[name]] < 0, name
        elif name not in bitwise.ELSEWHERE:
            assert added[name][EFFECTS[name]] > 0, name


def test_what_was_refused_says_why_and_all_else_was_compared() -> None:
    assert FIGURES["steps"] == 20
    assert FIGURES["compared"] + sum(FIGURES["refused"].values()) == RESULT["cases"]
    assert [row for row in FIGURES["refused"] if not row.partition(": ")[2].strip()] == []
    assert len(FIGURES["compared in each setting"]) == len(SETTINGS)


def setting(precision: str, index: int) -> Setting:
    return [*bitwise.settings_in(precision)][index]


def test_every_setting_has_dropout_and_its_steps() -> None:
    found = [one for precision in bitwise.PRECISIONS for one in bitwise.settings_in(precision)]
    assert len(found) == len(SETTINGS)
    for one in found:
        assert one.config["train.train_iters"] == bitwise.STEPS
        assert one.config["model.hidden_dropout"] == one.config["model.attention_dropout"] == 0.1
    assert {(one.model, *one.layout.items()) for one in found} == {
        (model, *layout.items()) for model, layout in LAYOUTS
    }


@pytest.mark.parametrize(("precision", "index"), SETTINGS)
def test_every_feature_and_allowed_pair_is_compared(precision: str, index: int) -> None:
    there = setting(precision, index)
    where = json.loads(json.dumps([there.model, there.layout, there.config]))
    found = [c for c in cases() if [c["model"], c["layout"], c["config"]] == where]
    refused = [frozenset(case["plugins"]) for case in found if case.get("refused")]
    runs = [frozenset(case["plugins"]) for case in found if not case.get("refused")]
    active, needs = [*bitwise.alone(there)], bitwise.needs()

    singles = {case["single"] for case in found if "single" in case}
    assert singles == {n for n in active if not any(r <= needs[n] for r in refused)}
    for pair in map(frozenset, combinations(active, 2)):
        closed = frozenset().union(*(needs[name] for name in pair))
        if not any(r <= closed for r in refused) and resolves(closed):
            assert any(closed <= names for names in runs), pair


@functools.cache
def resolves(names: frozenset[str]) -> bool:
    try:
        resolve(sorted(names), catalogue().load(sorted(names)))
    except AscendRunError:
        return False
    return True


@pytest.mark.needs_plugins(*FEATURES)
def test_every_feature_is_compared_under_every_parallelism_but_these() -> None:
    compared = {(c["single"], axis) for c in cases() if "single" in c for axis in c["layout"]}
    every = {axis for _, layout in LAYOUTS for axis in layout}
    missing = {name: every - {a for n, a in compared if n == name} for name in FEATURES}
    one_chunk = {"cp", "tp"}
    assert {name: axes for name, axes in missing.items() if axes} == {
        "recompute-activation": {"ep"},  # refused, as its options treat no layer with experts
        "recompute-comm-opt": {"pp", "vpp"},  # there are no tensor-parallel collectives
        "recompute-in-advance": one_chunk,
        "recompute-in-bubble": one_chunk,
    }


@pytest.fixture
def on_session_ranks(monkeypatch: pytest.MonkeyPatch, gloo_pool: GlooPool) -> Iterator[None]:
    """Run on the ranks of this session, without the references of other tests."""
    monkeypatch.setattr(bitwise, "pool", lambda: gloo_pool)
    bitwise._reference.cache_clear()
    yield
    bitwise._reference.cache_clear()


@pytest.mark.exhaustive(by=lambda precision: ())
@pytest.mark.usefixtures("on_session_ranks")
@pytest.mark.parametrize(("precision", "layout"), [("fp32", {"pp": 2, "vpp": 2}), ("bf16", {})])
def test_the_largest_set_changes_no_bit(precision: str, layout: Mapping[str, int]) -> None:
    there = next(one for one in bitwise.settings_in(precision) if one.layout == layout)
    (found,) = sets_of([(there, [*bitwise.alone(there)])], needs=bitwise.needs())
    largest = max(cases_of(found), key=lambda case: len(case["plugins"]))
    assert bitwise.run(json.dumps(largest)) == {"verdict": PASSED, "compared": True}


@attrs.frozen
class Faulty:
    """A pool on which runs with plugins have a fault."""

    pool: GlooPool
    fault: tuple[str, str, str]

    def run(self, job: Callable[..., Any], size: int, trial: Trial, timeout: float) -> Any:
        if not trial.plugins:
            return self.pool.run(job, size, trial, timeout=timeout)
        return self.pool.run(faulty, size, trial, *self.fault, timeout=timeout)


def faulty(trial: Trial, *fault: str) -> Trained:
    """A job: the steps of a trial with other code."""
    with mutated(*fault):
        return trained(trial)


def single(name: str, layout: Mapping[str, int]) -> str:
    there = next(one for one in bitwise.settings_in("fp32") if one.layout == layout)
    completed = there.complete(sorted(bitwise.needs()[name]))
    return json.dumps({**case_of(there, completed), "single": name})


@pytest.mark.usefixtures("on_session_ranks")
@pytest.mark.parametrize(
    ("name", "layout", "fault"),
    [
        pytest.param(
            "recompute",
            {},
            (
                "megatron.core.tensor_parallel.random:CheckpointFunction.backward",
                "_set_all_rng_states(*ctx.rng_states)",
                "pass",
            ),
            marks=pytest.mark.needs_plugins("recompute"),
        ),
        pytest.param(
            "recompute-in-bubble",
            {"pp": 2, "vpp": 2},
            (
                "ascend_run.plugins.memory:random_state",
                "random._set_all_rng_states(*earlier)",
                "pass",
            ),
            marks=pytest.mark.needs_plugins("recompute-in-bubble"),
        ),
    ],
    ids=["recompute", "recompute-in-bubble"],
)
def test_dropout_that_is_drawn_anew_is_found(
    monkeypatch: pytest.MonkeyPatch,
    gloo_pool: GlooPool,
    name: str,
    layout: Mapping[str, int],
    fault: tuple[str, str, str],
) -> None:
    monkeypatch.setattr(bitwise, "STEPS", 2)
    case = single(name, layout)
    assert bitwise.run(case)["verdict"] == PASSED
    monkeypatch.setattr(bitwise, "pool", lambda: Faulty(gloo_pool, fault))
    found = bitwise.run(case)
    assert (found["verdict"], found["smallest"]) == ("fails", [name])
    assert "the gradient norm of step 0 on rank 0 has relative error" in found["why"]


@pytest.mark.usefixtures("on_session_ranks")
@pytest.mark.needs_plugins("memory-fragmentation")
def test_a_feature_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitwise, "STEPS", 2)
    monkeypatch.setattr(bitwise, "ELSEWHERE", ())
    found = bitwise.run(single("memory-fragmentation", {}))
    assert found["verdict"] == "fails"
    assert "the last step does the same as without the plugins" in found["why"]


def rank(**changes: Any) -> Trained:
    """Return a rank after two steps."""
    weight = Shard(name="w", tensor=torch.ones(2), offset=(0,), global_shape=(2,))
    outcome = {
        "losses": (2.0, 1.0),
        "grad_norms": (0.5, 0.25),
        "shards": (weight,),
        "operations": {"bernoulli_": 1},
    }
    gradients = changes.pop("gradients", {"w (0,)": torch.ones(2)})
    return Trained(RankOutcome(**{**outcome, **changes}), gradients, file_bytes=0)


WEIGHT: Final = Shard(name="w", tensor=torch.ones(2) + 1e-7, offset=(0,), global_shape=(2,))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses": (2.0, 1.0 + 1e-15)}, "loss of step 1"),
        ({"grad_norms": (0.5 + 1e-15, 0.25)}, "gradient norm of step 0"),
        ({"shards": (WEIGHT,)}, "w has max error"),
        ({"gradients": {"w (0,)": torch.ones(2) + 1e-7}}, "the gradient of w (0,) in the last"),
        ({"gradients": {"w (0,)": torch.ones(2).double()}}, "the gradient of w (0,) in the last"),
        ({"gradients": {}}, "one run only has a gradient of w"),
    ],
    ids=["loss", "norm", "weight", "gradient", "dtype", "no gradient"],
)
def test_one_bit_is_a_difference(changes: dict[str, Any], said: str) -> None:
    (problem,) = differences([rank(**changes)], [rank()])
    assert said in problem
    assert not [*differences([rank()], [rank()])]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses": (2.0, 2.0)}, "the losses of 2 steps"),
        ({"losses": (2.0, float("nan"))}, "the losses of 2 steps"),
        ({"operations": {}}, "nothing is dropped"),
        ({"gradients": {"w (0,)": torch.zeros(2)}}, "every gradient is zero"),
    ],
    ids=["loss that stands still", "no number", "no dropout", "no gradient"],
)
def test_a_reference_that_shows_nothing_is_refused(changes: dict[str, Any], said: str) -> None:
    (problem,) = emptiness([rank(**changes)], 2)
    assert said in problem
    assert not [*emptiness([rank()], 2)]
