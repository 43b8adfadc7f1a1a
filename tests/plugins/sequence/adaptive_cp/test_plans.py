"""Partitions and transfers, without torch, against a dense mask."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_run.ops.attention.context_parallel.coarse_mask import coarse_mask
from ascend_run.ops.attention.context_parallel.partitions import Contiguous, ZigZag
from ascend_run.ops.attention.context_parallel.remap import (
    Remapped,
    candidates,
    dealt,
    price,
    remapped,
)
from ascend_run.ops.attention.context_parallel.rounds import Transfer, exchange_rounds, in_rounds
from ascend_run.ops.attention.context_parallel.schedule import masked_work
from ascend_run.plugin_api import DocumentPartition, Mask
from ascend_run.plugins.sequence.adaptive_cp import AdaptiveCp, AdaptiveCpConfig
from tests.support.ring_formula import seen
from tests.support.ring_jobs import run_of

PAGE = Path(__file__).parents[4] / "docs/plugins/sequence/adaptive-cp.md"
PAGES = (700, 1500, 1610, 3900, 4000, 4100, 5555, 7000)
"""Document ends of a batch of 8192."""
masks = st.builds(
    Mask,
    causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(-1, 20), st.integers(-1, 20)),
    document_ends=st.none() | st.lists(st.integers(1, 60), max_size=5).map(lambda e: (*sorted(e),)),
)


@given(
    mask=masks,
    remap=st.booleans(),
    size=st.sampled_from([1, 2, 3, 4]),
    each=st.integers(2, 4),
    parts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    placed=st.booleans(),
)
def test_visible_scores_are_computed_once_and_only_visible_keys_sent(
    mask: Mask, remap: bool, size: int, each: int, parts: tuple[int, int], placed: bool
) -> None:
    num_queries, num_keys = (each * size * part for part in parts)
    cut = Remapped(multiple=each, mask=Mask(window=mask.window)) if remap else Contiguous()
    own_cut = cut.of_documents(mask.document_ends) if mask.document_ends else cut

    def held(length: int, rank: int) -> list[int]:
        return [p for chunk in own_cut.chunks(length, rank, size) for p in range(*chunk)]

    for length in (num_queries, num_keys):
        parted = [held(length, rank) for rank in range(size)]
        assert sorted(itertools.chain(*parted)) == [*range(length)]
        assert {len(part) for part in parted} == {length // size}
    for rank in range(size):
        rows, own = held(num_queries, rank), held(num_keys, rank)
        work = masked_work(mask, cut, num_queries, num_keys, rank, size, placed)
        allowed = seen(mask, rows, range(num_keys))
        counted: Counter[tuple[int, int]] = Counter()
        received: list[int] = []
        for step in work.steps:
            columns = [p for span in step.keys for p in range(*span)]
            if step.received is not None:
                received += columns
                assert {*columns} <= {*held(num_keys, step.received.source)}
            if step.sent is not None:
                sent = [own[place] for span in step.sent_rows for place in range(*span)]
                assert sent == [p for span in step.sent.spans for p in range(*span)]
            for block in step.blocks:
                here, there = rows[block.rows], columns[block.columns]
                first, last = block.mask.query_start, block.mask.key_start
                if placed:
                    assert here == [*range(first, first + len(here))]
                    assert there == [*range(last, last + len(there))]
                spans = range(first, first + len(here)), range(last, last + len(there))
                inner = seen(block.mask, *spans)
                counted.update((here[i], there[j]) for i, j in inner.nonzero().tolist())
        assert counted == Counter({(rows[i], j): 1 for i, j in allowed.nonzero().tolist()})
        asked = {*allowed.any(0).nonzero().flatten().tolist()} - {*own}
        assert sorted(received) == sorted(asked)


@given(mask=masks, num_chunks=st.integers(1, 8), part=st.integers(1, 7))
def test_a_tile_has_the_pairs_and_the_keys_of_the_dense_mask(
    mask: Mask, num_chunks: int, part: int
) -> None:
    grid, length = coarse_mask(mask, num_chunks * part, num_chunks), num_chunks * part
    dense = seen(mask, range(length), range(length)).view(num_chunks, part, num_chunks, part)
    for i, row in enumerate(grid.rows):
        for j in range(num_chunks):
            tile = dense[i, :, j]
            found = (row[j].pairs, row[j].keys) if j in row else (0, 0)
            assert found == (int(tile.sum()), int(tile.any(0).sum()))


@given(
    edges=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda e: e[0] != e[1])),
    lengths=st.lists(st.integers(1, 9), min_size=36, max_size=36),
)
def test_rounds_are_the_most_sends_of_any_rank(
    edges: set[tuple[int, int]], lengths: list[int]
) -> None:
    messages = [
        Transfer(*edge, ((0, length),))
        for edge, length in zip(sorted(edges), lengths, strict=False)
    ]
    rounds = in_rounds(messages)
    assert sorted(m for found in rounds for m in found) == sorted(messages)
    for found in rounds:
        for ends in ([m.source for m in found], [m.target for m in found]):
            assert len({*ends}) == len(ends)
    busy = Counter(("from", s) for s, _ in edges) + Counter(("to", t) for _, t in edges)
    assert len(rounds) == max(busy.values(), default=0)


@given(
    mask=masks.map(lambda mask: Mask(window=mask.window, document_ends=mask.document_ends)),
    size=st.integers(1, 4),
    each=st.integers(2, 5),
    part=st.integers(1, 4),
)
def test_the_cheapest_assignment_is_chosen_and_its_cost_is_what_is_sent(
    mask: Mask, size: int, each: int, part: int
) -> None:
    length = each * size * part
    grid = coarse_mask(mask, length, each * size)
    found = remapped(grid, size)
    assert Counter(found) == Counter(dict.fromkeys(range(size), each))
    assert price(grid, found, size) <= min(price(grid, a, size) for a in candidates(grid, size))
    cut = Remapped(multiple=each, mask=mask)
    rounds = exchange_rounds(mask, cut, length, length, size)
    travelling = sum(m.num_keys for messages in rounds for m in messages)
    assert travelling == price(grid, found, size)[1]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_work_is_even_for_causal_masks_and_at_most_zig_zag_for_documents(
    size: int,
) -> None:
    """Checks the greatest work of a rank, relative to the mean."""
    each = AdaptiveCpConfig().chunks_per_rank
    length = 8192 // (each * size) * each * size
    for ends in (None, PAGES, PAGES[3:5], tuple(range(64, length, 64))):
        grid = coarse_mask(Mask(document_ends=ends), length, each * size)
        found, zig_zag = remapped(grid, size), dealt(each * size, size, each // 2)
        greatest = price(grid, found, size)[0]
        assert greatest <= price(grid, zig_zag, size)[0]
        assert greatest <= 1.05 * sum(grid.work) / size


def test_the_dealt_runs_are_the_zig_zag() -> None:
    for size, each in ((2, 2), (4, 4), (3, 6)):
        zig_zag = [{*ZigZag().chunks(2 * each * size, rank, size)} for rank in range(size)]
        for chunk, rank in enumerate(dealt(each * size, size, each // 2)):
            assert any(start <= 2 * chunk < end for start, end in zig_zag[rank])


def test_a_batch_is_sharded_by_its_documents_and_planned_once() -> None:
    partition = AdaptiveCp(AdaptiveCpConfig()).ascend_sequence_partition(config=run_of(4))
    assert isinstance(partition, DocumentPartition)
    of_batch = partition.of_documents(PAGES)
    assert of_batch.chunks(8192, 1, 4) is of_batch.chunks(8192, 1, 4)
    assert of_batch.chunks(8192, 1, 4) != partition.chunks(8192, 1, 4)
    in_order = AdaptiveCp(AdaptiveCpConfig(remap=False))
    assert in_order.ascend_sequence_partition(config=run_of(2)) == Contiguous()


def test_its_options_are_bounded() -> None:
    with pytest.raises(ValueError, match="must be >= 2"):
        AdaptiveCpConfig(chunks_per_rank=1)


def test_the_figures_of_the_page_are_those_of_the_plan() -> None:
    """The table of docs/plugins/adaptive-cp.md, row by row."""
    length, size, each = 32_768, 8, AdaptiveCpConfig().chunks_per_rank
    ends = {name: tuple(range(n, length, n)) for name, n in (("1000", 1000), ("5000", 5000))}
    rows = {
        "causal": Mask(),
        "window of 8192": Mask(window=(8191, 0)),
        "window of 4096": Mask(window=(4095, 0)),
        "window of 512": Mask(window=(511, 0)),
        "documents of 1000": Mask(document_ends=ends["1000"]),
        "documents of 5000": Mask(document_ends=ends["5000"]),
        "one of 16,000, others of 1000": Mask(document_ends=(16_000, *range(17_000, length, 1000))),
    }
    in_order, zig_zag = (tuple(i // each for i in range(each * size)), dealt(32, size, each // 2))
    text = PAGE.read_text(encoding="utf-8")
    for name, mask in rows.items():
        grid = coarse_mask(mask, length, each * size)
        mean, ring = sum(grid.work) / size, length * (size - 1)
        work, keys = zip(
            *(price(grid, a, size) for a in (remapped(grid, size), zig_zag, in_order)), strict=True
        )
        found = [f"{work[0] / mean:.2f}", f"{keys[0] / ring:.3f}"]
        found += [f"{w / mean:.2f}" for w in work[1:]]
        assert " | ".join(("", name, *found, f"{keys[2] / ring:.3f}", "")).strip() in text
