"""Tables of steps against those of each text alone."""

import pytest
import torch
from torch import Tensor

from ascend_run.ops.generation.positions import RotaryPositions
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.ops.generation.text_lengths import TextLengths


class Tables:
    """Writes the position and the length of its text; keeps how often it was asked."""

    num_calls = 0

    def __call__(self, positions: Tensor, length: int) -> Tensor:
        self.num_calls += 1
        return torch.stack((positions, torch.full_like(positions, length)), -1)[None].double()


def tables_of(lengths: TextLengths, *texts: tuple[int, int, int]) -> tuple[Tensor, int]:
    """Tables of texts (start, count, length), and the calls of this step."""
    made = Tables()
    positions = RotaryPositions(made, lengths, torch.float64, torch.device("cpu"))
    before = made.num_calls
    chunks = [
        Chunk(sequence=number, start=start, ids=[0] * count, num_logits=0, length=length)
        for number, (start, count, length) in enumerate(texts)
    ]
    return positions.tables(Step.of(chunks)), made.num_calls - before


@pytest.mark.parametrize(
    ("lengths", "counted", "num_calls"),
    [
        (TextLengths(64), [64, 64, 64], 0),
        (TextLengths(64, boundary=16), [16, 16, 64], 0),
        (TextLengths(64, boundary=16, grows=True), [16, 16, 40], 1),
        (TextLengths(64, boundary=64), [64, 64, 64], 0),
    ],
    ids=["fixed", "longrope", "dynamic", "whole"],
)
def test_each_token_has_its_position_in_a_text_of_its_length(
    lengths: TextLengths, counted: list[int], num_calls: int
) -> None:
    got, calls = tables_of(lengths, (3, 2, 5), (0, 1, 16), (20, 2, 40))
    wanted = [(3, counted[0]), (4, counted[0]), (0, counted[1]), (20, counted[2]), (21, counted[2])]
    assert got.tolist() == [[[*map(float, pair)] for pair in wanted]]
    assert calls == num_calls


@pytest.mark.parametrize(
    ("lengths", "same"),
    [
        (TextLengths(64), [True, True, True, True, True]),
        (TextLengths(64, boundary=16), [True, False, True, False, True]),
        (TextLengths(64, boundary=16, grows=True), [True, False, False, False, False]),
    ],
    ids=["fixed", "longrope", "dynamic"],
)
def test_texts_with_the_same_angles_have_the_same_keys(
    lengths: TextLengths, same: list[bool]
) -> None:
    pairs = [(3, 16), (16, 17), (17, 40), (17, 16), (20, 20)]
    assert [lengths.have_same_keys(*pair) for pair in pairs] == same


def test_only_longrope_starts_texts_again() -> None:
    assert TextLengths(64).restarts_above is None
    assert TextLengths(64, boundary=16).restarts_above == 16
    assert TextLengths(64, boundary=16, grows=True).restarts_above is None
