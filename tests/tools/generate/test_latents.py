"""Models with multi-latent attention: steps by cached latents against those by keys and values."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ascend_run.ops.generation.beams import BeamSearch
from ascend_run.ops.generation.step import Chunk, Step
from ascend_run.ops.linear.packed_linear import unavailable
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.memory import token_bytes
from ascend_run.tools.generate.model import GenerationModel, loaded_model
from ascend_run.tools.generate.recognition import cached_latents
from ascend_run.types.config import FieldSection
from ascend_run.types.forward import CHAIN, ForwardChain, ForwardLink, LinkPlace, NamedLink
from tests.plugins.models.cases import BY_NAME

from .test_beams import requests, searched
from .test_lean import LATENT, save
from .test_logits import logits_in_chunks, logits_of_new, whole

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*tp_group is None:DeprecationWarning",
    "ignore:.*rope.*:UserWarning",
)

CASES = [(name, label) for name in sorted(LATENT) for label in BY_NAME[name].variants]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latents")
    save("deepseek_v3", "yarn", path)
    return path


@pytest.fixture
def loaded(folder: Path) -> Iterator[GenerationModel]:
    with loaded_model(folder, SourceOptions(), torch.float64) as model:
        yield model


def texts(model: GenerationModel) -> list[list[int]]:
    draw = random.Random(3)
    vocab_size = model.config.model.vocab_size
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in (37, 20, 9)]


def steps(model: GenerationModel) -> list[Any]:
    """Logits of texts in chunks of each size, and of new tokens."""
    sizes = (1, 3, 16, 64, random.Random(0))
    found: list[Any] = [logits_in_chunks(model, texts(model), size) for size in sizes]
    return [*found, logits_of_new(model, [ids[:7] for ids in texts(model)], 4)]


def by_keys(model: GenerationModel) -> GenerationModel:
    """Have the modules compute steps from now on."""
    model._stage.latents.layers.clear()
    return model


def num_bytes(model: GenerationModel) -> int:
    """Bytes of the cache for a sequence of three pages, once it has been written."""
    cache = model.with_cache(64)
    cache.reserve(0, 40)
    model.logits(Step.of([Chunk(sequence=0, start=0, ids=[1, 2], num_logits=1)]))
    return cache.num_bytes


@pytest.mark.exhaustive(by=lambda case: [case[0], "plain" in case[1]])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case).replace(" ", "_"))
def test_steps_of_a_family_are_those_of_its_keys_and_values(
    case: tuple[str, str], tmp_path: Path
) -> None:
    save(*case, tmp_path)
    with loaded_model(tmp_path, SourceOptions(family=case[0]), torch.float64) as model:
        layers = len(model._stage.chunk.decoder.layers)
        assert len(model._stage.latents.layers) == layers
        got, latents = steps(model), num_bytes(model)
        search = BeamSearch(num_beams=3)
        asked = requests(3, 12, model.config.model.vocab_size)
        found = searched(model, asked, search)
        want, keys = steps(by_keys(model)), num_bytes(model)
        assert [one.ids for one in found] == [one.ids for one in searched(model, asked, search)]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    of_model = model.config.model
    width = of_model.qk_head_dim + of_model.qk_pos_emb_head_dim + of_model.v_head_dim
    assert latents == 48 * layers * (of_model.kv_lora_rank + of_model.qk_pos_emb_head_dim) * 8
    assert keys == 48 * layers * of_model.num_attention_heads * width * 8


def test_the_memory_of_a_token_is_that_of_its_latents(loaded: GenerationModel) -> None:
    """DeepSeek-V3's, in bfloat16: 70 kB, where its keys and values would take 5 MB. Each rank has
    the whole latent."""
    assert num_bytes(loaded) == 48 * token_bytes(loaded.config, torch.float64)
    changed = {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "num_layers": 61}
    config = attrs.evolve(loaded.config, model=FieldSection({**loaded.config.model, **changed}))
    assert token_bytes(config, torch.bfloat16) == 61 * 576 * 2 == 70_272
    assert token_bytes(config, torch.bfloat16, tp=4) == 4 * 70_272


def test_an_adapter_is_in_the_latents(folder: Path, tmp_path: Path) -> None:
    """Of the projections down and up, which steps read without their modules."""
    torch.manual_seed(5)
    named = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "kv_a_proj" in name or "kv_b_proj" in name:
            at = f"base_model.model.{name.removesuffix('.weight')}"
            named[f"{at}.lora_A.weight"] = torch.randn(2, weight.shape[1])
            named[f"{at}.lora_B.weight"] = torch.randn(weight.shape[0], 2) / 4
    save_file(named, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with loaded_model(folder, SourceOptions(), torch.float64) as model:
        ids = texts(model)[0]
        before = whole(model, ids)
    with loaded_model(folder, SourceOptions(adapter=tmp_path), torch.float64) as model:
        assert model._stage.latents.layers
        (got,), want = logits_in_chunks(model, [ids], 3), whole(model, ids)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert (got - before).abs().max() > 0.1


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 2**6), (torch.bfloat16, 2**3)])
def test_steps_in_other_dtypes_are_close(folder: Path, dtype: torch.dtype, units: int) -> None:
    """Here weights are packed, and plain ones are freed but for the one that is read as it is."""
    with loaded_model(folder, SourceOptions(), dtype) as model:
        assert model._stage.latents.layers
        plain = {*model._stage.latents.linears()}
        for linear, weight in model._stage.lean.weights.items():
            packs = unavailable(dtype) is None
            assert (weight.packed is not None) == packs
            assert bool(weight.plain_NK.isnan().all()) == (packs and linear not in plain)
        ids = texts(model)[0]
        (got,), want = logits_in_chunks(model, [ids], 3), whole(model, ids)
    assert got.dtype is dtype
    torch.testing.assert_close(
        got, want, rtol=0, atol=float(want.abs().max()) * units * torch.finfo(dtype).eps
    )


def attention(model: GenerationModel) -> Any:
    return model._stage.chunk.decoder.layers[0].self_attention


def recognised(model: GenerationModel) -> bool:
    return cached_latents(attention(model), model._stage.lean.weights) is not None


@pytest.mark.parametrize("name", ["linear_kv_up_proj", "core_attention"])
def test_a_link_of_a_plugin_is_not_passed_over(
    loaded: GenerationModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module: nn.Module = getattr(attention(loaded), name)
    assert recognised(loaded)
    link = ForwardLink(wrap=lambda inner: inner, compilable=False)
    named = NamedLink(name="of-a-plugin", place=LinkPlace.AROUND, link=link)
    monkeypatch.setattr(module, CHAIN, ForwardChain(module.forward, (named,)), raising=False)
    assert not recognised(loaded)


def test_what_is_not_a_product_with_the_weight_alone_is_not_passed_over(
    loaded: GenerationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias, a hook, another module, training, and a kernel that reads no pages."""
    module = attention(loaded)
    up, kernel = module.linear_kv_up_proj, module.core_attention.kernel

    def declines(holder: Any, name: str, value: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, value)
            assert not recognised(loaded)

    for held, name, value in (
        (up._parameters, "bias", nn.Parameter(torch.zeros(1))),
        (up._forward_hooks, 0, lambda *_: None),
        (module._modules, "core_attention", nn.Identity()),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(held, name, value)
            assert not recognised(loaded)
    declines(module, "training", True)
    declines(module.core_attention, "kernel", kernel.inner)
    without = attrs.evolve(kernel.inner.features, cached=False)
    declines(kernel.inner, "features", without)
    assert recognised(loaded)


def test_links_of_its_own_modules_are_computed(
    loaded: GenerationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of modules that steps call are no reason to decline."""
    ids = texts(loaded)[1]
    (before,) = logits_in_chunks(loaded, [ids], 3)
    norm = attention(loaded).kv_layernorm
    own = norm.forward

    def doubled(x: Tensor) -> Tensor:
        out: Tensor = own(x)
        return 2 * out

    monkeypatch.setattr(norm, "forward", doubled)
    assert recognised(loaded)
    (got,) = logits_in_chunks(loaded, [ids], 3)
    torch.testing.assert_close(got, whole(loaded, ids), rtol=0, atol=1e-10)
    assert (got - before).abs().max() > 1e-3


def test_the_scale_of_queries_by_their_positions_is_applied(
    loaded: GenerationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = texts(loaded)[1]
    before = whole(loaded, ids)
    monkeypatch.setattr(loaded._stage.chunk, "log_n_length", 4)
    (got,), want = logits_in_chunks(loaded, [ids], 3), whole(loaded, ids)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert (got - before).abs().max() > 1e-3


def test_a_mask_of_a_batch_is_refused_as_by_the_modules(loaded: GenerationModel) -> None:
    step = Step.of([Chunk(sequence=0, start=0, ids=[1, 2], num_logits=1)])
    loaded.with_cache(16).reserve(0, 2)
    mask = torch.ones(1, 2, 2, dtype=torch.bool)
    with loaded._stage.forward.running(step), pytest.raises(ValueError, match="neither a bias"):
        loaded._stage.chunk(torch.tensor([[1, 2]]), torch.arange(2)[None], attention_mask=mask)
