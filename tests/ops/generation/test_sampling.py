"""The choice of tokens against transformers' processors, and draws against their distribution."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from ascend_run.ops.generation.sampling import Sampler, Sampling, choices, processed

VOCAB = 60
IDS = [3, 7, 7, 59, 0, 12]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.6, "min_p": 0.2, "repetition_penalty": 1.5},
]
NAMES = ["-".join(f"{name}={value}" for name, value in one.items()) or "plain" for one in SETTINGS]


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            eos_token_id=None,
        )
    )


def by_transformers(model: LlamaForCausalLM, logits_V: Tensor, setting: dict[str, Any]) -> Tensor:
    """Process logits by what ``generate(do_sample=True)`` builds, in its order."""
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **setting})
    model._prepare_special_tokens(config, device=torch.device("cpu"))
    processors = model._get_logits_processor(config, input_ids_seq_length=len(IDS))
    scores: Tensor = processors(torch.tensor([IDS]), logits_V[None].clone())[0]
    return scores


def ours(setting: dict[str, Any], **changes: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, **setting, **changes})


def logits_of(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(VOCAB, generator=generator, dtype=dtype)


@pytest.mark.parametrize("setting", SETTINGS, ids=NAMES)
def test_processed_logits_are_those_of_transformers(
    reference: LlamaForCausalLM, setting: dict[str, Any]
) -> None:
    """Bit for bit; half of the rows have equal logits, and one has four tokens of equal ones."""
    four_V = torch.full((VOCAB,), -math.inf).index_fill(0, torch.tensor([3, 7, 30, 59]), 1.0)
    want = by_transformers(reference, four_V, setting)
    assert torch.equal(processed(four_V, IDS, ours(setting)), want)
    for seed in range(40):
        logits_V = logits_of(seed, torch.float64 if seed % 3 == 0 else torch.float32)
        if seed % 2:
            logits_V = logits_V.round()
        want = by_transformers(reference, logits_V, setting)
        assert torch.equal(processed(logits_V, IDS, ours(setting)), want)


@pytest.mark.exhaustive(by=lambda draws, setting: [0] * (draws == 10_000 and len(setting) == 4))
@pytest.mark.parametrize("draws", [10_000, 100_000])
@pytest.mark.parametrize("setting", SETTINGS, ids=NAMES)
def test_draws_are_of_the_distribution_of_transformers(
    reference: LlamaForCausalLM, setting: dict[str, Any], draws: int
) -> None:
    logits_V = logits_of(1)
    probabilities_V = by_transformers(reference, logits_V, setting).double().softmax(-1)
    sampler = Sampler(ours(setting, seed=5))
    tokens = [sampler.choose(logits_V, IDS).token for _ in range(draws)]
    counts_V = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
    assert not counts_V[probabilities_V == 0].any()
    expected_V = draws * probabilities_V
    rare_V = expected_V < 5  # pooled, as the statistic needs
    observed = torch.cat([counts_V[~rare_V], counts_V[rare_V].sum()[None]])
    expected = torch.cat([expected_V[~rare_V], expected_V[rare_V].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) > 1:
        statistic = ((observed - expected).square() / expected).sum()
        freedom = torch.tensor(len(expected) - 1.0, dtype=torch.float64)
        assert torch.special.gammaincc(freedom / 2, statistic / 2) > 1e-3  # the p-value


def test_equal_seeds_draw_equal_tokens_and_others_do_not() -> None:
    def tokens(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.choose(logits_of(3), IDS).token for _ in range(30)]

    assert tokens(1) == tokens(1) != tokens(2)


def test_a_draw_of_zero_takes_no_impossible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.zeros(*size).double())
    logits_V = torch.tensor([-math.inf, -math.inf, 0.0, 0.0])
    assert Sampler(Sampling(temperature=1.0)).choose(logits_V, []).token == 2


def test_rows_are_chosen_each_by_its_own_sampler() -> None:
    logits_RV = torch.stack([logits_of(seed) for seed in range(4)])
    settings = [
        Sampling(),
        Sampling(temperature=1.0, seed=9),
        Sampling(repetition_penalty=1e9),
        Sampling(logprobs=2),
    ]
    ids = [[], IDS, [int(logits_RV[2].argmax())], []]
    got = choices(logits_RV, [Sampler(one) for one in settings], ids)
    assert got == [
        Sampler(one).choose(logits_RV[row], ids[row]) for row, one in enumerate(settings)
    ]
    assert got[0].token == int(logits_RV[0].argmax())
    assert got[2].token == int(logits_RV[2].topk(2).indices[1])


def test_log_probabilities_are_of_the_raw_distribution() -> None:
    logits_V = logits_of(2)
    want_V = logits_V.double().softmax(-1).log()
    sampling = Sampling(temperature=3.0, top_k=4, repetition_penalty=2.0, logprobs=3, seed=1)
    choice = Sampler(sampling).choose(logits_V, IDS)
    assert choice.logprob == pytest.approx(float(want_V[choice.token]), abs=1e-6)
    assert [token for token, _ in choice.top] == logits_V.topk(3).indices.tolist()
    assert [value for _, value in choice.top] == pytest.approx(
        want_V.topk(3).values.tolist(), abs=1e-6
    )
    assert Sampler(Sampling(logprobs=0)).choose(logits_V, []).top == ()
    assert len(Sampler(Sampling(logprobs=999)).choose(logits_V, []).top) == VOCAB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_logits_are_processed_as_float32(dtype: torch.dtype) -> None:
    logits_V = logits_of(4).to(dtype)
    sampling = Sampling(temperature=0.7, top_p=0.9, logprobs=5)
    got = Sampler(sampling).choose(logits_V, IDS)
    assert got == Sampler(sampling).choose(logits_V.float(), IDS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("logprobs", -1),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a number"):
        Sampling(**{name: value})
