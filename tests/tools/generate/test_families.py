"""Logits of steps for every model family: against a whole forward, and against transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_run.ops.generation.engine import Request
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.memory import token_bytes
from ascend_run.tools.generate.model import loaded_model
from tests.plugins.models.cases import CASES, FAMILIES, Family
from tests.plugins.models.published import publish

from .test_logits import logits_in_chunks, logits_of_new, require_each_of_its_text, whole

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")
NUM_PROMPTS = 26


def aspects(case: str) -> list[object]:
    """What the suite's few cases show; every case runs in the campaign."""
    family, _ = CASES[case]
    words = ("window", "yarn", "factors, a window", "one group")
    shown = [("experts", family.experts), *(word for word in words if word in case)]
    return [*shown, family.name == "deepseek_v3"]


@pytest.mark.exhaustive(by=lambda family: {family.name} & {"llama"})
@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if not one.publish], ids=lambda family: family.name
)
def test_greedy_ids_of_a_family_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    """A batch of unequal prompts, each alone in transformers; in the campaign more than 500."""
    model: Any = family.model(torch.float64)
    model.save_pretrained(tmp_path)
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
        with computing_in(torch.float64), torch.no_grad():
            out = model.eval().generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=8,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert new == out[0, len(prompt) :].tolist()


@pytest.mark.exhaustive(by=aspects)
@pytest.mark.parametrize("case", CASES)
def test_steps_of_a_family_are_as_its_whole_forward(case: str, tmp_path: Path) -> None:
    """In every arrangement, and with each new token of an answer."""
    family, changes = CASES[case]
    model: Any = family.model(torch.float64, **changes)
    model.save_pretrained(tmp_path)
    if family.publish:
        publish(tmp_path, family.publish, model.config)
    draw = random.Random(case)
    with loaded_model(tmp_path, SourceOptions(family=family.name), torch.float64) as loaded:
        vocab_size = loaded.config.model.vocab_size
        sequences = [[draw.randrange(vocab_size) for _ in range(length)] for length in (22, 9)]
        wanted = [whole(loaded, ids) for ids in sequences]
        for ids, got in zip(sequences, wanted, strict=True):
            with computing_in(torch.float64), torch.no_grad():
                want = model.eval()(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        for size in (1, 3, 16, 64, draw):
            for got, want in zip(logits_in_chunks(loaded, sequences, size), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        prompts = [ids[:length] for ids, length in zip(sequences, (4, 7), strict=True)]
        for ids, logits in logits_of_new(loaded, prompts, 6):
            require_each_of_its_text(loaded, ids, logits)

        cache = loaded.with_cache(64)
        cache.reserve(0, 40)
        loaded.logits(Step.of([Chunk(sequence=0, start=0, ids=sequences[0], num_logits=1)]))
        assert cache.num_bytes == 48 * token_bytes(loaded.config, torch.float64)
