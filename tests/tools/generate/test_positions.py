"""Every scaling of rotary positions: steps, against whole forwards and transformers."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ascend_run.ops.generation.beam_engine import BeamEngine
from ascend_run.ops.generation.beams import BeamSearch
from ascend_run.ops.generation.engine import Engine, Request
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.plugin_api.errors import ConfigError
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.model import GenerationModel, loaded_model
from ascend_run.tools.generate.model_options import ModelOptions
from ascend_run.tools.generate.searching import searched
from tests.support.tiny_llama import write_llama

from .test_logits import (
    TOLERANCES,
    logits_in_chunks,
    logits_of_new,
    require_each_of_its_text,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")

LONGROPE: Final = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 3.5, 4.0],
    "original_max_position_embeddings": 16,
}
SCALINGS: Final[dict[str, dict[str, Any]]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": LONGROPE,
}
BOUNDARY: Final = 16
CACHED: Final = {
    "linear": [0, 7, 15, 22, 6],
    "dynamic": [0, 7, 0, 0, 0],
    "longrope": [0, 7, 0, 22, 0],
}
"""Tokens of a conversation that are not recomputed."""


def write(folder: Path, kind: str) -> Path:
    """Write a model whose texts change their angles above ``BOUNDARY`` tokens, if they do."""
    parameters = {"rope_theta": 500.0, **SCALINGS[kind]}
    longest = BOUNDARY if kind == "dynamic" else 64
    write_llama(folder, 61, rope_parameters=parameters, max_position_embeddings=longest)
    return folder


def opened(folder: Path, rope_length: int | None = None, dtype: torch.dtype = torch.float64) -> Any:
    options = ModelOptions(rope_length=rope_length)
    return loaded_model(folder, SourceOptions(), dtype, options)


def of_transformers(folder: Path, prompt: Sequence[int], num_new: int) -> Tensor:
    """Logits [new, V] that its cached generation chooses greedily by."""
    with computing_in(torch.float64), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            pad_token_id=0,
            eos_token_id=-1,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return torch.stack([logits[0] for logits in found.logits])


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [(11, 9), (16, 16), (17, 6), (30, 22)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", SCALINGS)
def test_steps_of_a_scaling_are_as_its_whole_forward(
    kind: str, dtype: torch.dtype, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """Texts on both sides of the boundary, in one batch."""
    draw = random.Random(1)
    sequences = [[draw.randrange(61) for _ in range(length)] for length in lengths]
    with opened(write(tmp_path, kind), dtype=dtype) as model:
        wanted = [whole(model, ids) for ids in sequences]
        for size in (1, 3, 16, 64, draw):
            for got, want in zip(logits_in_chunks(model, sequences, size), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("prompts", [(1, 14), (16, 17), (10, 30)], ids=str)
def test_a_text_that_passes_the_boundary_of_longrope_starts_again(
    prompts: tuple[int, ...], tmp_path: Path
) -> None:
    draw = random.Random(2)
    with opened(write(tmp_path, "longrope")) as model:
        texts = [[draw.randrange(61) for _ in range(length)] for length in prompts]
        for ids, logits in logits_of_new(model, texts, 12):
            require_each_of_its_text(model, ids, logits)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "longrope"])
def test_a_resumed_text_is_as_a_new_one(kind: str, tmp_path: Path) -> None:
    """Texts of 8, 16, 23 and 30 tokens, and a part of the last one."""
    draw = random.Random(3)
    cached, requests, found = [], [], []

    def answer(engine: Engine) -> list[int]:
        return [one.token for _ in range(4) for one in engine.step()]

    with opened(write(tmp_path, kind)) as model:
        engine = model.engine(64)
        for length in (0, 8, 15, 22, 6):
            last = [*requests[-1].prompt, *found[-1]] if found else []
            prompt = (*last[:length], *(draw.randrange(61) for _ in range(4)))
            requests.append(Request(prompt=prompt, max_new_tokens=4, is_kept=True))
            if length:
                engine.resume(0, requests[-1])
            else:
                engine.submit(requests[-1])
            found.append(answer(engine))
            cached.append(engine.num_cached(0))
        for request, new in zip(requests, found, strict=True):
            engine = model.engine(64)
            engine.submit(request)
            assert answer(engine) == new
    assert cached == CACHED[kind]


def test_phi3_passes_the_boundary_as_in_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "phi3",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=BOUNDARY,
        initializer_range=0.2,
        pad_token_id=None,
        rope_parameters={"rope_theta": 500.0, **LONGROPE},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    prompt = torch.randint(61, (12,)).tolist()
    with loaded_model(tmp_path, SourceOptions(), torch.float64) as model:
        ((_, logits),) = logits_of_new(model, [prompt], 12)
    torch.testing.assert_close(logits, of_transformers(tmp_path, prompt, 12), rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [12, 20])
def test_dynamic_keeps_old_keys_as_transformers_does(length: int, tmp_path: Path) -> None:
    """Beside a short text, whose angles stay."""
    torch.manual_seed(4)
    prompts = [torch.randint(61, (size,)).tolist() for size in (length, 3)]
    with opened(write(tmp_path, "dynamic")) as model:
        assert model.max_length == 2 * BOUNDARY
        found = logits_of_new(model, prompts, 12)
    for (_, logits), prompt in zip(found, prompts, strict=True):
        want = of_transformers(tmp_path, prompt, 12)
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kind", "length"), [("dynamic", 40), ("longrope", 40), ("longrope", 12)])
def test_a_stated_length_gives_every_text_its_angles(
    kind: str, length: int, tmp_path: Path
) -> None:
    """They are those of the text with tokens after it, up to the length."""
    torch.manual_seed(5)
    ids = torch.randint(61, (length,)).tolist()
    with opened(write(tmp_path, kind), length) as model:
        assert model.max_length == length
        want = whole(model, ids)
        (logits,) = logits_in_chunks(model, [ids], 3)
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-10)
        got = of_prompt_alone(model, ids[:10])
        torch.testing.assert_close(got, want[:10], rtol=0, atol=1e-10)


def of_prompt_alone(model: GenerationModel, ids: Sequence[int]) -> Tensor:
    model.with_cache(16).reserve(0, 16)
    return model.logits(Step.of([Chunk(sequence=0, start=0, ids=ids, num_logits=len(ids))]))


def test_beams_of_a_long_prompt_have_its_angles(tmp_path: Path) -> None:
    """In chunks, against transformers."""
    torch.manual_seed(6)
    prompt = torch.randint(61, (20,)).tolist()
    search = BeamSearch(num_beams=3)
    with opened(write(tmp_path, "dynamic")) as model:
        engine = BeamEngine(model.logits, model.with_cache(128), search, chunk_tokens=4)
        engine.submit(Request(prompt=tuple(prompt), max_new_tokens=8))
        found = [one for _ in range(13) for one in engine.step()]
    with computing_in(torch.float64), torch.no_grad():
        reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        want = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            num_beams=3,
            max_new_tokens=8,
            pad_token_id=0,
            eos_token_id=-1,
        )
    assert [one.ids for one in found] == [tuple(want[0, 20:].tolist())]


def test_beams_that_may_pass_the_boundary_of_longrope_are_refused(tmp_path: Path) -> None:
    request, search = Request(prompt=(1, 2), max_new_tokens=2), BeamSearch(num_beams=2)
    message = r"--num-beams 2: .* \(longrope\) has other angles for texts above 16 tokens"
    with opened(write(tmp_path, "longrope")) as model, pytest.raises(ConfigError, match=message):
        next(searched(model, [request], search))
    with opened(tmp_path, 64) as model:
        assert len(next(searched(model, [request], search)).ids) == 2


@pytest.mark.parametrize(
    ("kind", "length", "message"),
    [("linear", 8, "this model has linear"), ("longrope", 65, "expected at most 64")],
)
def test_a_length_without_sense_is_refused(
    kind: str, length: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message), opened(write(tmp_path, kind), length):
        pass
