"""Logits of steps for every model family: against a whole forward, and against transformers."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.ops.generation.engine import Request
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.plugin_api import Claim
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.memory import token_bytes
from ascend_run.tools.generate.model import loaded_model
from tests.plugins.models.cases import CASES, FAMILIES, Family
from tests.plugins.models.published import publish

from .test_logits import (
    TOLERANCES,
    logits_in_chunks,
    logits_of_new,
    require_each_of_its_text,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")
NUM_PROMPTS = 15


def aspects(case: str, dtype: torch.dtype) -> list[object]:
    """What the suite's few cases show; every case runs in the campaign."""
    family, _ = CASES[case]
    words = ("window", "yarn", "factors, a window", "one group")
    shown = [("experts", family.experts), *(word for word in words if word in case)]
    return [*shown, family.name == "deepseek_v3", dtype]


@pytest.mark.exhaustive(by=lambda family: {family.name} & {"llama"})
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_greedy_ids_of_a_family_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    """A batch of unequal prompts, each alone in transformers; in the campaign 510, 15 of each of 34
    families. A family that transformers lacks is there the one of its architecture; grok1 has none,
    and is its formulas."""
    model: Any = family.model(torch.float64)
    model.save_pretrained(tmp_path)
    if family.publish:
        publish(tmp_path, family.publish, model.config)
    draw = random.Random(family.name)
    with loaded_model(tmp_path, SourceOptions(family=family.name), torch.float64) as loaded:
        ids = range(3, loaded.config.model.vocab_size)
        prompts = [tuple(draw.choices(ids, k=draw.randint(1, 12))) for _ in range(NUM_PROMPTS)]
        engine = loaded.engine(NUM_PROMPTS * 32, max_sequences=8)
        asked = [Request(prompt=prompt, max_new_tokens=8) for prompt in prompts]
        found: dict[int, list[int]] = {engine.submit(one): [] for one in asked}
        while not engine.is_idle:
            for emitted in engine.step():
                found[emitted.sequence].append(emitted.token)
    for prompt, new in zip(prompts, found.values(), strict=True):
        assert new == greedy(model.eval(), family, prompt, 8)


def greedy(model: Any, family: Family, prompt: Sequence[int], num_new: int) -> list[int]:
    """Answer by whole forwards of a model that is no model of transformers, or is changed by hand
    so that it reads no cache; of another one by transformers' own loop."""
    with computing_in(torch.float64), torch.no_grad():
        if family.build is not None:
            ids = list(prompt)
            for _ in range(num_new):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            return ids[len(prompt) :]
        out = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=num_new,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=Claim.POSITION_BIAS not in family.owns,
        )
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


@pytest.mark.exhaustive(by=aspects)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_steps_of_a_family_are_as_its_whole_forward(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In every arrangement, and with each new token of an answer."""
    family, changes = CASES[case]
    # With wider ones there are logits of 57, of which 1e-5 is three units in the last place.
    narrow = {"initializer_range": 0.1} if dtype is torch.float32 else {}
    model: Any = family.model(dtype, **changes, **narrow)
    model.save_pretrained(tmp_path)
    if family.publish:
        publish(tmp_path, family.publish, model.config)
    draw = random.Random(case)
    with loaded_model(tmp_path, SourceOptions(family=family.name), dtype) as loaded:
        vocab_size = loaded.config.model.vocab_size
        sequences = [[draw.randrange(vocab_size) for _ in range(length)] for length in (22, 9)]
        wanted = [whole(loaded, ids) for ids in sequences]
        for ids, got in zip(sequences, wanted, strict=True):
            with computing_in(dtype), torch.no_grad():
                want = model.eval()(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[dtype])
        for size in (1, 3, 16, 64, draw):
            for got, want in zip(logits_in_chunks(loaded, sequences, size), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[dtype])
        prompts = [ids[:length] for ids, length in zip(sequences, (4, 7), strict=True)]
        for ids, logits in logits_of_new(loaded, prompts, 6):
            require_each_of_its_text(loaded, ids, logits)

        cache = loaded.with_cache(64)
        cache.reserve(0, 40)
        loaded.logits(Step.of([Chunk(sequence=0, start=0, ids=sequences[0], num_logits=1)]))
        assert cache.num_bytes == 48 * token_bytes(loaded.config, dtype)
