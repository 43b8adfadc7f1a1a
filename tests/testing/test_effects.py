"""Collectives and bytes are counted at the dispatcher, for every sender."""

from __future__ import annotations

from ascend_run.testing.pool import GlooPool

from . import effect_jobs


def test_each_collective_is_counted_with_the_bytes_that_a_rank_puts_in(
    gloo_pool: GlooPool,
) -> None:
    for seen in gloo_pool.run(effect_jobs.known_messages, 2):
        assert seen.calls == {"allreduce_": 2, "alltoall_base_": 1, "_allgather_base_": 1}
        assert seen.sent_bytes == {
            "allreduce_": 2 * 16,
            "alltoall_base_": 64,
            "_allgather_base_": 16,
        }
        assert [(m.operation, m.nbytes) for m in seen.collective_calls[1:3]] == [
            ("allreduce_", 16),
            ("alltoall_base_", 64),
        ]
        assert {m.ranks for m in seen.collective_calls} == {(0, 1)}


def test_a_message_has_the_ranks_of_its_group(gloo_pool: GlooPool) -> None:
    for rank, seen in enumerate(gloo_pool.run(effect_jobs.messages_of_pairs, 4)):
        pair = (rank % 2, rank % 2 + 2)
        assert [(m.operation, m.ranks) for m in seen.collective_calls] == [
            ("allreduce_", pair),
            ("allreduce_", (0, 1, 2, 3)),
        ]
