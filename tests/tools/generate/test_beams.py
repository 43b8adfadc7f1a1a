"""Beam searches against those of transformers, token for token."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ascend_run.ops.generation.beam_engine import BeamEngine, Found, pages_of
from ascend_run.ops.generation.beams import BeamSearch
from ascend_run.ops.generation.engine import Request
from ascend_run.ops.generation.key_value_cache import CacheFull
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.model import GenerationModel, loaded_model
from tests.plugins.models.cases import FAMILIES, Family
from tests.support.tiny_llama import write_llama

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")

VOCAB = 23
ENDS = (5, 9)
SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "length_penalty": 0.0},
    {"num_beams": 2, "early_stopping": "never"},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 4, "length_penalty": -1.0, "early_stopping": "never"},
    {"num_beams": 4, "early_stopping": "true"},
    {"num_beams": 5, "length_penalty": -0.5},
    {"num_beams": 3, "repetition_penalty": 1.4, "early_stopping": "true"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return Path(write_llama(path, VOCAB, eos_token_id=list(ENDS), pad_token_id=0))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    with computing_in(torch.float64):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture
def model(folder: Path) -> Iterator[GenerationModel]:
    with loaded_model(folder, SourceOptions(), torch.float64) as loaded:
        yield loaded


def requests(
    number: int, max_new_tokens: int, vocab_size: int = VOCAB, longest: int = 40
) -> list[Request]:
    draw = random.Random(3)
    return [
        Request(
            prompt=tuple(draw.choices(range(vocab_size), k=draw.randint(1, longest))),
            max_new_tokens=draw.randint(1, max_new_tokens),
            end_ids=frozenset(ENDS),
        )
        for _ in range(number)
    ]


def searched(
    model: GenerationModel, asked: list[Request], search: BeamSearch, num_together: int = 3
) -> list[Found]:
    needed = sorted(pages_of(request, search, 16) for request in asked)
    cache = model.with_cache(16 * sum(needed[-num_together:]))
    engine = BeamEngine(model.logits, cache, search, chunk_tokens=16)
    for request in asked:
        engine.submit(request)
    found = {}
    while not engine.is_idle:
        for one in engine.step():
            found[one.number] = one
    assert cache.free_tokens == 16 * cache.num_pages
    return [found[number] for number in range(len(asked))]


def by_transformers(reference: Any, request: Request, search: BeamSearch) -> list[int]:
    early: Any = {"true": True, "false": False}.get(search.early_stopping, search.early_stopping)
    with computing_in(torch.float64), torch.no_grad():
        out = reference.generate(
            torch.tensor([request.prompt]),
            attention_mask=torch.ones(1, len(request.prompt), dtype=torch.int64),
            do_sample=False,
            num_beams=search.num_beams,
            length_penalty=search.length_penalty,
            early_stopping=early,
            repetition_penalty=float(search.repetition_penalty),
            max_new_tokens=request.max_new_tokens,
            eos_token_id=sorted(request.end_ids),
            pad_token_id=0,
        )
    new: list[int] = out[0, len(request.prompt) :].tolist()
    return new


@pytest.mark.parametrize("options", SEARCHES, ids=str)
def test_ids_are_those_of_transformers(
    model: GenerationModel, reference: Any, options: dict[str, Any]
) -> None:
    """Several searches together, of which each is alone in transformers."""
    search = BeamSearch(**options)
    # those of forty that end at unequal lengths by the three ways to stop
    asked = [request for number, request in enumerate(requests(40, 20)) if number in (12, 17, 32)]
    for request, found in zip(asked, searched(model, asked, search), strict=True):
        assert list(found.ids) == by_transformers(reference, request, search)
        assert found.finish == ("stop" if found.ids[-1] in ENDS else "length")


@pytest.mark.exhaustive(by=lambda family: [])
@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if not one.publish], ids=lambda family: family.name
)
def test_ids_of_a_family_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    """In the campaign 504 prompts, 24 of each of 21 families."""
    reference: Any = family.model(torch.float64)
    reference.save_pretrained(tmp_path)
    search = BeamSearch(**SEARCHES[len(family.name) % len(SEARCHES)])
    with loaded_model(tmp_path, SourceOptions(family=family.name), torch.float64) as model:
        asked = requests(24, 10, model.config.model.vocab_size, longest=15)
        for request, found in zip(asked, searched(model, asked, search), strict=True):
            assert list(found.ids) == by_transformers(reference, request, search)


def test_a_search_that_never_fits_is_refused(model: GenerationModel) -> None:
    engine = BeamEngine(model.logits, model.with_cache(96), BeamSearch(num_beams=4))
    request = Request(prompt=(1,) * 20, max_new_tokens=14)  # one page shared, four times two
    with pytest.raises(CacheFull, match=r"20 tokens and 14 new ones need 9 pages, and .* has 6"):
        engine.submit(request)
