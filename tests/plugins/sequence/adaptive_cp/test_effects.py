"""Communication, memory and computation, against the formulas of its page and a dense mask."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_run.plugin_api import Mask
from ascend_run.plugins.sequence.adaptive_cp import AdaptiveCp, AdaptiveCpConfig
from ascend_run.testing.pool import GlooPool
from tests.support import ring_formula as formula
from tests.support import ring_jobs as jobs
from tests.support.ring_formula import Case

ITEM = 8
SIZE = 4
ADAPTIVE = AdaptiveCp(AdaptiveCpConfig())
CONTIGUOUS = AdaptiveCp(AdaptiveCpConfig(remap=False))
SHAPES = {
    "multi-head": Case(),
    "multi-query": Case(groups=1, mask=Mask(window=(3, 0))),
    "packed": Case(batch=None, groups=2),
    "unequal-widths": Case(width=6, value_width=3, groups=2),
    "fewer-keys": Case(mask=Mask(causal=False), key_length=16),
    "documents": Case(mask=Mask(document_ends=(3, 9, 17))),
    "nothing-to-send": Case(mask=Mask(document_ends=(8, 16, 24))),
}


def asked(plugin: AdaptiveCp, case: Case) -> list[list[int]]:
    """Return [from][to]: the keys of one rank that some query of another sees, by the dense
    mask."""
    rows = [jobs.held(plugin, case, case.length, rank, SIZE) for rank in range(SIZE)]
    columns = [jobs.held(plugin, case, case.num_keys, rank, SIZE) for rank in range(SIZE)]
    return [
        [
            int(formula.seen(case.mask, rows[to], columns[source]).any(0).sum()) * (to != source)
            for to in range(SIZE)
        ]
        for source in range(SIZE)
    ]


def count(numbers: Sequence[int]) -> int:
    return sum(number > 0 for number in numbers)


def test_the_first_message_is_one_of_all_ranks(gloo_pool: GlooPool) -> None:
    """Some rounds leave ranks out, and a backend may wait for a full group in its first call."""
    for (outcome,) in gloo_pool.run(jobs.attend, SIZE, ADAPTIVE, [SHAPES["nothing-to-send"]]):
        (message,) = outcome.forward.collective_calls
        assert (message.operation, message.ranks) == ("allreduce_", (0, 1, 2, 3))


def test_visible_keys_are_sent_twice_and_their_gradients_once(gloo_pool: GlooPool) -> None:
    for plugin in (ADAPTIVE, CONTIGUOUS):
        ranks = gloo_pool.run(jobs.attend, SIZE, plugin, [*SHAPES.values()])
        for index, case in enumerate(SHAPES.values()):
            keys = asked(plugin, case)
            each = (case.batch or 1) * case.groups * (case.width + case.value_width) * ITEM
            for rank, outcomes in enumerate(ranks):
                forward, backward = outcomes[index].forward, outcomes[index].backward
                sent, received = keys[rank], [row[rank] for row in keys]
                assert forward.calls["send"] == count(sent)
                assert forward.calls["recv_"] == count(received)
                assert forward.sent_bytes["send"] == sum(sent) * each
                assert backward.calls["send"] == count(sent) + count(received)
                assert backward.calls["recv_"] == count(sent) + count(received)
                assert backward.sent_bytes["send"] == (sum(sent) + sum(received)) * each
                assert {*backward.calls} <= {"send", "recv_"}
                assert {*forward.calls} <= {"send", "recv_", "allreduce_"}
                assert forward.calls["allreduce_"] == 1
                assert outcomes[index].saved_bytes == 0


def test_with_a_window_an_eighth_of_a_rings_bytes_travel(gloo_pool: GlooPool) -> None:
    """A ring sends all 8 keys of a rank to the next; only the last is visible, and none at the
    end."""
    case = Case(mask=Mask(window=(1, 0)))
    ranks = gloo_pool.run(jobs.attend, SIZE, CONTIGUOUS, [case])
    part = case.length // SIZE * (case.batch or 1) * case.groups * 2 * case.width * ITEM
    sent = [outcome.forward.sent_bytes["send"] for (outcome,) in ranks]
    assert sent == [part // 8] * (SIZE - 1) + [0]
