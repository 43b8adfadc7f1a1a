"""Logits of steps against those of a whole forward, and against transformers."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ascend_run.ops.generation.engine import Engine, Request
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.model import GenerationModel, loaded_model
from tests.support.tiny_llama import write_llama

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")

VOCAB, LENGTHS = 400, (29, 12, 40)
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def model(folder: Path) -> Iterator[GenerationModel]:
    with loaded_model(folder, SourceOptions(), torch.float64) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    torch.manual_seed(3)
    return [torch.randint(VOCAB, (length,)).tolist() for length in LENGTHS]


def logits_in_chunks(
    model: GenerationModel, sequences: Sequence[Sequence[int]], size: int | random.Random
) -> list[Tensor]:
    """Compute sequences together, each in chunks of ``size`` tokens, but the first step of the
    i-th of ``size + i``: so the sequences are at unequal positions. Or draw the sizes, and which
    sequences have a part in a step."""
    cache = model.with_cache(256)
    for number, ids in enumerate(sequences):
        cache.reserve(number, len(ids))
    at = [0] * len(sequences)
    got: list[list[Tensor]] = [[] for _ in sequences]
    while at != [len(ids) for ids in sequences]:
        chunks = []
        for number, ids in enumerate(sequences):
            if isinstance(size, random.Random):
                count = size.choice((0, 1, 1, 5))
            else:
                count = size if at[number] else size + number
            new = ids[at[number] : at[number] + count]
            if new:
                chunk = Chunk(
                    sequence=number,
                    start=at[number],
                    ids=new,
                    num_logits=len(new),
                    length=len(ids),
                )
                chunks.append(chunk)
        if not chunks:
            continue
        logits = iter(model.logits(Step.of(chunks)).split([chunk.num_logits for chunk in chunks]))
        for chunk in chunks:
            got[chunk.sequence].append(next(logits))
            at[chunk.sequence] += chunk.num_logits
    return [torch.cat(parts) for parts in got]


def whole(model: GenerationModel, ids: Sequence[int]) -> Tensor:
    """Logits [S, V] of a forward without a cache."""
    out: Tensor = model._stage.chunk(torch.tensor([ids]), torch.arange(len(ids))[None])
    return out[0]


def logits_of_new(
    model: GenerationModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[tuple[list[int], Tensor]]:
    """Answer prompts as one batch in chunks of 4 tokens.

    Returns:
        Of each, the ids with the new ones, and the logits [new, V] that chose those.
    """
    got: list[Tensor] = []

    def forward(step: Step) -> Tensor:
        logits = model.logits(step)
        got.extend(logits)
        return logits

    engine = Engine(
        forward,
        model.with_cache(256),
        chunk_tokens=4,
        restarts_above=model.lengths.restarts_above,
    )
    texts = [list(prompt) for prompt in prompts]
    chosen: list[list[Tensor]] = [[] for _ in prompts]
    for ids in prompts:
        engine.submit(Request(prompt=tuple(ids), max_new_tokens=max_new_tokens))
    while not engine.is_idle:
        emitted = engine.step()
        for one, logits in zip(emitted, got, strict=True):
            texts[one.sequence].append(one.token)
            chosen[one.sequence].append(logits)
        got.clear()
    return [(ids, torch.stack(logits)) for ids, logits in zip(texts, chosen, strict=True)]


def require_each_of_its_text(model: GenerationModel, ids: Sequence[int], logits: Tensor) -> None:
    """Each new token's logits are the last ones of a whole forward over the text before it."""
    for back, got in enumerate(logits.flip(0), start=1):
        want = whole(model, ids[:-back])[-1]
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[got.dtype])


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 3, 7, 64])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "three"])
def test_logits_of_chunks_are_those_of_the_whole_forward(
    model: GenerationModel, sequences: list[list[int]], size: int, together: bool
) -> None:
    chosen = sequences if together else sequences[:1]
    for got, ids in zip(logits_in_chunks(model, chosen, size), chosen, strict=True):
        torch.testing.assert_close(got, whole(model, ids), rtol=0, atol=1e-10)


def test_logits_are_those_of_transformers(
    model: GenerationModel, folder: Path, sequences: list[list[int]]
) -> None:
    with computing_in(torch.float64), torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        wanted = [reference(torch.tensor([ids])).logits[0] for ids in sequences]
    for got, want in zip(logits_in_chunks(model, sequences, 3), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_logits_in_float32_are_close(folder: Path, sequences: list[list[int]]) -> None:
    with loaded_model(folder, SourceOptions(), torch.float32) as model:
        for got, ids in zip(logits_in_chunks(model, sequences, 3), sequences, strict=True):
            torch.testing.assert_close(got, whole(model, ids), rtol=0, atol=TOLERANCES[got.dtype])


def test_logits_in_bfloat16_are_close(folder: Path, sequences: list[list[int]]) -> None:
    with loaded_model(folder, SourceOptions(), torch.bfloat16) as model:
        for got, ids in zip(logits_in_chunks(model, sequences, 3), sequences, strict=True):
            assert got.dtype is torch.bfloat16
            want = whole(model, ids)
            # Sums of other lengths round otherwise: some units in the last place, of 8 bits.
            torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**-6)


def test_only_the_wanted_rows_have_logits(
    model: GenerationModel, sequences: list[list[int]]
) -> None:
    cache = model.with_cache(64)
    cache.reserve(0, 29)
    first, rest = sequences[0][:20], sequences[0][20:]
    assert len(model.logits(Step.of([Chunk(sequence=0, start=0, ids=first, num_logits=0)]))) == 0
    got = model.logits(Step.of([Chunk(sequence=0, start=20, ids=rest, num_logits=1)]))
    torch.testing.assert_close(got, whole(model, sequences[0])[-1:], rtol=0, atol=1e-10)
