"""The options of Ulysses alone: what is saved for backward, and KV routing.

The other suites here apply to any all-to-all over heads, with default options.
"""

from __future__ import annotations

from typing import Any

import pytest

from ascend_run.plugin_api import contracts as c
from ascend_run.plugins.sequence.ulysses import Ulysses, UlyssesConfig
from ascend_run.testing.models import DENSE
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from tests.support import ring_checks as checks
from tests.support import ring_jobs as jobs
from tests.support.costs import calls, planned, sent_bytes
from tests.support.ring_formula import Case

from .test_rules import config, problems

ITEM = 8
LENGTH, HEADS, WIDTH, VALUE_WIDTH = 32, 4, 4, 3
ONE_GROUP = {
    "multi-query": Case(groups=1, width=WIDTH, value_width=VALUE_WIDTH),
    "packed": Case(groups=1, batch=None),
    "documents": Case(groups=1, mask=c.Mask(document_ends=checks.DOCUMENTS)),
    "other-keys-than-queries": Case(groups=1, mask=checks.FREE, key_length=48),
    "inner-reads-no-inputs": Case(groups=1, reads=frozenset({"out", "lse"})),
    "inner-reads-keys-only": Case(groups=1, reads=frozenset({"k", "out", "lse"})),
}
MORE = {
    "multi-head": Case(),
    "grouped": Case(groups=2, slopes=True),
    "ranks-share-groups-unevenly": Case(heads=12, groups=3),
    "heads-of-one-rank-need-two-groups": Case(heads=24, groups=6),
}


def ulysses(**options: Any) -> Ulysses:
    return Ulysses(UlyssesConfig(**options))


@pytest.mark.exhaustive(by=lambda kv_cache, kv: [kv_cache, kv])
@pytest.mark.parametrize("kv", ["exchange", "all-gather"])
@pytest.mark.parametrize("kv_cache", ["none", "half", "full"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_form_is_at_parity_and_sends_and_keeps_what_the_page_says(
    gloo_pool: GlooPool, size: int, kv_cache: str, kv: str
) -> None:
    named = ONE_GROUP if kv == "all-gather" else ONE_GROUP | MORE
    plugin = ulysses(kv=kv, kv_cache=kv_cache)
    for outcomes in checks.assert_at_parity(gloo_pool, plugin, named, size):
        seen, case = outcomes[0], ONE_GROUP["multi-query"]
        rows = LENGTH // size * (case.batch or 1) * ITEM
        queries, out, lse = rows * HEADS * WIDTH, rows * HEADS * VALUE_WIDTH, rows * HEADS
        again = {"none": WIDTH + VALUE_WIDTH, "half": VALUE_WIDTH, "full": 0}[kv_cache]
        widths = WIDTH + VALUE_WIDTH
        forward = {"alltoall_base_": queries + out + lse}
        backward = {"alltoall_base_": out + queries + rows * size * widths}
        if kv == "exchange":  # each rank has its own copy of the one head
            forward["alltoall_base_"] += rows * size * widths
            backward["alltoall_base_"] += rows * size * again
        else:
            forward["_allgather_base_"] = rows * widths
            if again:
                backward["_allgather_base_"] = rows * again
        assert dict(seen.forward.sent_bytes) == forward
        assert dict(seen.backward.sent_bytes) == backward
        assert sum(seen.forward.calls.values()) == (2 if kv == "exchange" else 3)
        assert sum(seen.backward.calls.values()) == 2 + len(backward) - 1
        kept = {"none": 0, "half": WIDTH, "full": widths}[kv_cache] * rows * size
        assert seen.saved_bytes == queries + out + lse + kept


def test_no_rank_holds_all_heads_of_the_full_sequence(gloo_pool: GlooPool) -> None:
    """Relative to one tensor of a rank before the all-to-all."""
    case = Case(length=512, groups=4, width=16, value_width=16)
    share = case.length // 4 * (case.batch or 1) * case.heads * 16 * ITEM
    peaks = {}
    for kv_cache in ("full", "none"):
        for (outcome,) in gloo_pool.run(jobs.attend, 4, ulysses(kv_cache=kv_cache), [case], True):
            peaks[kv_cache] = outcome.peak_bytes / share
    gathering = gloo_pool.run(jobs.attend_gathering, 4, ulysses(), case)
    peaks["gathered"] = min(o.peak_bytes / share for o in gathering)
    assert max(peaks["full"], peaks["none"]) <= 25 < peaks["gathered"], peaks


@pytest.mark.exhaustive(by=lambda: ())
@pytest.mark.parametrize(
    ("options", "groups", "layers"),
    [
        ({"kv_cache": "half", "kv_cache_every": 2}, 2, ("half", "none")),
        ({"kv_cache": "none", "kv": "all-gather"}, 1, ("none", "none")),
    ],
    ids=["exchange", "all-gather"],
)
def test_a_run_is_at_parity_and_its_collectives_match_the_plan(
    parity: Parity,
    gloo_pool: GlooPool,
    options: dict[str, Any],
    groups: int,
    layers: tuple[str, str],
) -> None:
    set_to = {f"plugins.ulysses.{name}": value for name, value in options.items()}
    model = {"model.num_query_groups": groups}
    parity("ulysses", layout={"cp": 4}, config=model, options=set_to)

    whole = {**DENSE, **model, **set_to, "parallel.context_parallel_size": 4}
    _, (cost,) = planned(whole, ("ulysses",), 4)
    trial = Trial(plugins=("ulysses",), config=whole, steps=1)
    outcome = gloo_pool.run(run_trial, 4, trial)[0]
    for operation, name in (
        ("all_to_all", "alltoall_base_"),
        ("all_gather", "_allgather_base_"),
    ):
        sent = [
            m for m in outcome.collective_calls if (m.operation, m.ranks) == (name, (0, 1, 2, 3))
        ]
        # The optimizer's collectives use the same four ranks.
        of_it = [m for m in sent if operation == "all_to_all" or m.nbytes < 4000]
        assert calls(cost, operation, "cp") == len(of_it), name
        assert sent_bytes(cost, operation, "cp") == sum(m.nbytes for m in of_it), name

    kept = {
        (change.tensors[0].rpartition(".")[2], layer): change.factor
        for change in cost.changes["ulysses"].saved
        for layer in change.layers or ()
    }
    times = 4 / groups
    assert kept == {
        (name, layer): times
        for layer, kv_cache in enumerate(layers)
        for name in {"none": "", "half": "k", "full": "kv"}[kv_cache]
    }


def test_keys_are_gathered_only_where_all_ranks_need_the_same_head() -> None:
    gathering = ulysses(kv="all-gather")
    (problem,) = problems(config(heads=8, tp=2, cp=2), gathering)
    assert "plugins.ulysses.kv=all-gather" in problem
    assert "model.num_query_groups=8 over tp=2" in problem
    assert problems(config(heads=8, groups=2, tp=2, cp=2), gathering) == []
