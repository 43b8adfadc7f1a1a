"""Rotary tables against angles written out number by number."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from ascend_run.core.model.rotary import RotaryTable, RotaryTables

WIDTH, LENGTH, BASE = 6, 12, 100.0


class Zigzag:
    """Every rank holds a piece from the front and one from the back."""

    multiple = 2

    def chunks(self, seq_length: int, rank: int, size: int) -> list[tuple[int, int]]:
        piece = seq_length // (2 * size)
        ends = 2 * size - 1 - rank
        return [(rank * piece, (rank + 1) * piece), (ends * piece, (ends + 1) * piece)]


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_entry_is_the_cosine_or_sine_of_its_pairs_angle(interleaved: bool) -> None:
    table = RotaryTable(WIDTH, BASE, interleaved=interleaved)
    cos, sin = table(LENGTH, torch.float64, torch.device("cpu"))
    assert cos.shape == (LENGTH, WIDTH)
    for position in range(LENGTH):
        for entry in range(WIDTH):
            pair = entry // 2 if interleaved else entry % (WIDTH // 2)
            angle = position * BASE ** (-2 * pair / WIDTH)
            assert float(cos[position, entry]) == pytest.approx(math.cos(angle), abs=1e-14)
            assert float(sin[position, entry]) == pytest.approx(math.sin(angle), abs=1e-14)


def test_a_rank_holds_the_rows_of_its_own_positions_in_its_own_order() -> None:
    device = torch.device("cpu")
    whole = RotaryTable(WIDTH, BASE)(LENGTH, torch.float64, device)
    for rank, rows in enumerate([[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]):
        part = RotaryTable(WIDTH, BASE, partition=Zigzag(), cp_rank=rank, cp_size=2)
        assert part.positions(LENGTH).tolist() == rows
        assert torch.equal(part(LENGTH, torch.float64, device), whole[:, rows])


class InTurn(Zigzag):
    """Every document is cut in two halves, one a rank."""

    document_ends = (LENGTH,)

    def chunks(self, seq_length: int, rank: int, size: int) -> list[tuple[int, int]]:
        halves = [((a + (b - a) // 2 * rank), a + (b - a) // 2 * (rank + 1)) for a, b in self._all]
        return halves

    @property
    def _all(self) -> list[tuple[int, int]]:
        return list(pairwise((0, *self.document_ends)))

    def of_documents(self, document_ends: tuple[int, ...]) -> InTurn:
        told = InTurn()
        told.document_ends = document_ends
        return told


def test_where_documents_decide_what_a_rank_holds_so_they_do_of_its_rows() -> None:
    device = torch.device("cpu")
    whole = RotaryTable(WIDTH, BASE)(LENGTH, torch.float64, device)
    table = RotaryTable(WIDTH, BASE, partition=InTurn(), cp_rank=1, cp_size=2)
    for ends, rows in (((4, 12), [2, 3, 8, 9, 10, 11]), ((6, 12), [3, 4, 5, 9, 10, 11])):
        assert torch.equal(table(LENGTH, torch.float64, device, ends), whole[:, rows])
    assert torch.equal(table(LENGTH, torch.float64, device), whole[:, 6:])


def test_bfloat16_tables_are_rounded_once_from_exact_angles() -> None:
    device, far = torch.device("cpu"), 100_000
    table = RotaryTable(2, BASE)
    cos, _ = table(far + 1, torch.bfloat16, device)
    assert float(cos[far, 0]) == float(torch.tensor(math.cos(far)).bfloat16())


def test_a_table_is_made_once_for_each_length_and_dtype() -> None:
    device = torch.device("cpu")
    table = RotaryTable(WIDTH, BASE)
    assert table(8, torch.float32, device) is table(8, torch.float32, device)
    assert table(4, torch.float32, device).shape == (2, 4, WIDTH)
    assert table(8, torch.float64, device).dtype is torch.float64


def test_layers_without_and_with_a_window_have_tables_of_their_own_base() -> None:
    given = (LENGTH, torch.float64, torch.device("cpu"))
    without, with_window = RotaryTables(RotaryTable(WIDTH, BASE), RotaryTable(WIDTH, 7.0))(*given)
    assert torch.equal(without, RotaryTable(WIDTH, BASE)(*given))
    assert torch.equal(with_window, RotaryTable(WIDTH, 7.0)(*given))
