"""Rows that begin alike share what they have in common."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.step import Step
from ascend_run.tools.evaluate.row_scores import Row, Scores, row_scores
from ascend_run.tools.evaluate.row_trees import trees

V = 5
NO_RESTART = SimpleNamespace(restarts_above=None)


class PrefixModel:
    """A ``GenerationModel`` whose logits depend on all tokens before, which it reads from the
    cache."""

    def __init__(self, lengths: Any = NO_RESTART) -> None:
        self.lengths, self.num_computed = lengths, 0

    def with_cache(self, num_tokens: int) -> KeyValueCache:
        self.cache = KeyValueCache(num_tokens)
        self.num_tokens = self.cache.free_tokens
        return self.cache

    def logits(self, step: Step) -> Tensor:
        self.num_computed += len(step.tokens_T)
        found: dict[int, Tensor] = {}
        for part in step.parts:
            tokens = step.tokens_T[part.rows].double().view(-1, 1, 1)
            keys, _ = self.cache.append(0, part, tokens, tokens)
            for at in range(part.count):
                found[part.first + at] = logits_after(keys[: part.start + at + 1, 0, 0])
        return torch.stack([found[int(row)] for row in step.rows_R] or [torch.empty(V)])


def logits_after(tokens: Tensor) -> Tensor:
    mixed = (tokens * torch.arange(1, len(tokens) + 1).double().sqrt()).sum()
    return 3 * torch.sin(mixed + torch.arange(V).double() ** 2)


def wanted(row: Row) -> Scores:
    ids = [int(one) for one in row.ids]
    scores, greedy = [], True
    for at in range(row.first, row.num_inputs):
        logits = logits_after(torch.tensor(ids[: at + 1]).double())
        scores.append(logits.log_softmax(-1)[ids[at + 1]])
        greedy &= int(logits.argmax()) == ids[at + 1]
    return Scores(torch.stack(scores), greedy)


def scored(rows: list[Row], chunk_tokens: int, **options: Any) -> PrefixModel:
    """Check the scores of rows."""
    model: Any = PrefixModel(**options)
    for row, found in zip(rows, row_scores(model, rows, chunk_tokens), strict=True):
        right = wanted(row)
        torch.testing.assert_close(
            found.log_probabilities, right.log_probabilities, rtol=0, atol=1e-12
        )
        assert found.greedy == right.greedy
    assert model.cache.free_tokens == model.num_tokens
    return model


def num_distinct(rows: Iterable[Row]) -> int:
    """Number of texts that are the begin of inputs."""
    inputs = [tuple(row.ids[:-1]) for row in rows]
    return len({ids[:end] for ids in inputs for end in range(1, len(ids) + 1)})


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    """Rows that share 0, 16 or 40 tokens, and often more."""
    shared = draw(st.sampled_from([0, 16, 40]))
    token = st.integers(0, V - 1)
    ends = draw(st.lists(st.lists(token, min_size=2, max_size=20), min_size=1, max_size=12))
    ids = [[1] * shared + end for end in ends for _ in range(draw(st.integers(1, 2)))]
    return [Row(ids=one, num_scored=draw(st.integers(1, len(one) - 1))) for one in ids]


@settings(max_examples=25)
@given(rows=some_rows(), chunk_tokens=st.sampled_from([1, 3, 17, 512]))
def test_scores_are_those_of_each_row_alone(rows: list[Row], chunk_tokens: int) -> None:
    model = scored(rows, chunk_tokens)
    assert model.num_computed <= sum(row.num_inputs for row in rows)
    if all(row.ids[:16] == [1] * 16 for row in rows):
        assert model.num_computed == num_distinct(rows)


@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_a_prompt_is_computed_once_for_all_its_labels(chunk_tokens: int) -> None:
    """Questions after the same examples compute these once as well, as long as the cache holds
    their tree."""
    examples = [n % V for n in range(100)]
    questions = [examples + [n % V] * 9 for n in range(4)]
    rows = [Row(ids=[*one, label], num_scored=1) for one in questions for label in range(4)]
    model = scored(rows, chunk_tokens)
    assert model.num_computed == num_distinct(rows) == 100 + 4 * 9
    answers = [[0], [1, 2], [1, 3, 4], [1, 2, 3]]
    rows = [Row(ids=one + end, num_scored=len(end)) for one in questions for end in answers]
    model = scored(rows, chunk_tokens)
    assert model.num_computed == num_distinct(rows) == 100 + 4 * (9 + 3)


def test_many_trees_go_through_a_small_cache() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.randint(2, 150, (60,), generator=draw).tolist():
        ids = torch.randint(V, (length,), generator=draw).tolist()
        rows += [Row(ids=[*ids, label], num_scored=2) for label in (0, 1)]
    model = scored(rows, 32)
    assert model.num_computed == sum(len(row.ids) - 1 for row in rows[::2])
    assert model.num_tokens < 2 * 3 * 160 + 64 * 32 + 100


def test_nothing_is_shared_where_angles_depend_on_the_length() -> None:
    rows = [Row(ids=[*[1] * 30, label], num_scored=1) for label in range(3)]
    model = scored(rows, 512, lengths=SimpleNamespace(restarts_above=8))
    assert model.num_computed == 90


def test_a_tree_of_many_pages_is_followed_by_another() -> None:
    rows = [Row(ids=[1] * 16 + [n] * 20, num_scored=1) for n in range(9)]
    found = [*trees(rows, 6)]
    assert [len(tree.root.rows) for tree in found] == [3, 3, 3]
    assert [tree.num_pages for tree in found] == [1 + 3 * 2] * 3
    assert [number for tree in found for number, _ in tree.root.rows] == [*range(9)]
    assert len([*trees(rows, 6, share=False)]) == 9
