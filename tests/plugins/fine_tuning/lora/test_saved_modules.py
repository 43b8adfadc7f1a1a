"""Modules that are trained in full beside the adapters, against PEFT's ``modules_to_save``."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from ascend_run.core.hooks import Hooks
from ascend_run.plugin_api import CheckpointError, ConfigError, RunConfig, RunPhase
from ascend_run.plugins.fine_tuning.lora import Lora, LoraOptions
from ascend_run.plugins.fine_tuning.lora.as_reference import switched_off
from ascend_run.plugins.fine_tuning.lora.base import BaseRecord
from ascend_run.testing.models import DENSE, MOE
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from ascend_run.testing.tensors import differences, full_tensors
from ascend_run.types.config import RunSection
from tests.core.train.runs import Runs, whole_run, write_tokens
from tests.plugins.fine_tuning.lora.test_rules import LATENT as LATENT_MODEL
from tests.plugins.fine_tuning.lora.test_rules import problems, write_header
from tests.support.costs import planned
from tests.support.loaded_model import largest_difference
from tests.support.tiny_configs import model_fields, parallel_fields
from tests.support.tiny_llama import write_llama

from .against_peft import TOLERANCE
from .lora_jobs import base_values, hf_names, run_once
from .merged_models import check_each_merge, convert, merged_by_peft, written_as_exported
from .peft_models import (
    VOCAB,
    peft_model,
    read_peft,
    trained,
    write_latent,
    write_mixtral,
    write_peft,
)
from .peft_runs import assert_trained_adapter, train_with_peft, values, write_conversations

EVERY = {
    "word_embeddings": "embed_tokens",
    "output_layer": "lm_head",
    "final_layernorm": "model.norm",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
OURS, THEIRS = [*EVERY], [*EVERY.values()]
TARGETS = ("q_proj", "v_proj", "o_proj")
SAME = ["linear_q", "linear_v", "linear_proj"]


def saved(*theirs: str) -> dict[str, Any]:
    return {"targets": TARGETS, "modules_to_save": [*theirs]}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "all of a Llama": ("llama", {}, EVERY),
    "norms of a Llama": ("llama", {}, {"input_layernorm": "input_layernorm"}),
    "a tied embedding": (
        "llama",
        {"tie_word_embeddings": True},
        {"word_embeddings": "embed_tokens"},
    ),
    "the router": ("mixtral", {}, {"router": "mlp.gate", "final_layernorm": "model.norm"}),
    "norms of latents": (
        "minicpm3",
        {},
        {"q_layernorm": "q_a_layernorm", "kv_layernorm": "kv_a_layernorm"},
    ),
}
WRITE = {"llama": write_llama, "mixtral": write_mixtral}


@pytest.mark.exhaustive(by=lambda case: [case])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_are_those_of_peft(
    gloo_pool: GlooPool, batch: tuple[Tensor, Tensor], tmp_path: Path, case: str
) -> None:
    family, changes, modules = CASES[case]
    if family == "minicpm3":
        base = write_latent(tmp_path / "base", family)
    else:
        base = WRITE[family](tmp_path / "base", vocab_size=VOCAB, **changes)
    tied = {"ensure_weight_tying": bool(changes)}
    targets = ("o_proj",) if family == "minicpm3" else TARGETS
    options = {**saved(*modules.values()), "targets": targets, **tied}
    model = peft_model(base, **options)
    adapter = write_peft(model, tmp_path / "adapter")
    tokens, labels = batch
    logits = model(input_ids=tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    ours = ["linear_proj"] if family == "minicpm3" else SAME
    run = {
        **base_values(base, adapter, model__family=family),
        "plugins.lora.target_modules": ours,
        "plugins.lora.modules_to_save": [*modules],
        **({"model.moe_aux_loss_coeff": 0.0} if family == "mixtral" else {}),
    }
    (outcome,) = gloo_pool.run(run_once, 1, run, tokens, labels)

    assert largest_difference(outcome.logits_BSV, logits.detach()) < TOLERANCE
    expected = {name: p.grad for name, p in trained(model).items() if p.grad is not None}
    gradients = hf_names(outcome.gradients)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():  # ours of a vocabulary has padding
        rows = gradient[: len(expected[name])]
        assert largest_difference(rows, expected[name]) < TOLERANCE, name
    assert sorted(outcome.trained) == sorted(outcome.gradients), "nothing else is trained"
    with torch.no_grad(), model.disable_adapter():
        plain = model(input_ids=tokens).logits
    assert largest_difference(plain, logits.detach()) > 0.01


@pytest.fixture(scope="module", params=["separate", "tied"])
def workplace(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Write a base model, its tokenizer, conversations and an initial adapter."""
    folder = tmp_path_factory.mktemp(request.param)
    tied = request.param == "tied"
    base = write_llama(folder / "model", tie_word_embeddings=tied)
    write_conversations(folder)
    theirs = [name for name in THEIRS if not (tied and name == "lm_head")]
    model = peft_model(base, **saved(*theirs), ensure_weight_tying=tied)
    write_peft(model, folder / "adapter")
    return folder


def run_values(workplace: Path, output: Path, **changes: Any) -> dict[str, Any]:
    tied = workplace.name.startswith("tied")
    return {
        **values(workplace, output),
        "plugins.lora.target_modules": SAME,
        "plugins.lora.modules_to_save": [n for n in OURS if not (tied and n == "output_layer")],
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


SP = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
PP = {"parallel__pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"train__micro_batch_size": 2}),
    "tp=2 sp": (2, SP),
    "pp=2": (2, PP),
    "distributed optimizer": (2, {"ddp__use_distributed_optimizer": True}),
}


@pytest.fixture(scope="module")
def reference(workplace: Path) -> tuple[list[float], dict[str, Tensor]]:
    return train_with_peft(workplace)


@pytest.mark.exhaustive(by=lambda layout: [LAYOUTS[layout][0] > 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_and_the_export_are_those_of_peft(
    gloo_pool: GlooPool,
    workplace: Path,
    reference: tuple[list[float], dict[str, Tensor]],
    tmp_path: Path,
    layout: str,
) -> None:
    ranks, changes = LAYOUTS[layout]
    run = run_values(workplace, tmp_path, **changes)
    ended = gloo_pool.run(whole_run, ranks, run, ("lora",), timeout=100)
    expected, weights = reference
    losses = [line["loss"] for line in ended[0].readings]
    assert losses == pytest.approx(expected, rel=1e-5)
    folders, tied = (tmp_path / "adapter", workplace / "adapter"), workplace.name.startswith("tied")
    assert_trained_adapter(*folders, weights, has_copies=tied)


def test_peft_reads_what_is_exported_bit_for_bit(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    """No step changes weights: what is read is written, and shared over two ranks, padded."""
    odd = {"model__make_vocab_size_divisible_by": 64, "optimizer__lr": 0.0}
    run = run_values(workplace, tmp_path, train__train_iters=1, **odd, **SP)
    gloo_pool.run(whole_run, 2, run, ("lora",), timeout=100)
    stored = load_file(workplace / "adapter/adapter_model.safetensors")
    exported = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    held = trained(read_peft(workplace / "model", tmp_path / "adapter"))
    assert all(torch.equal(stored[name], tensor) for name, tensor in held.items())
    assert "base_model.model.model.embed_tokens.weight" in held


@pytest.mark.parametrize("contents", ["adapters", "full"])
def test_a_run_is_merged_and_written_with_its_modules(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path, contents: str
) -> None:
    base = str(workplace / "model")
    run = run_values(
        workplace,
        tmp_path / "run",
        train__train_iters=3,
        checkpoint__save_interval=3,
        plugins__lora__checkpoint=contents,
        plugins__lora__load=None,
        optimizer__lr=0.05,
        **SP,
    )
    gloo_pool.run(whole_run, 2, run, ("lora",), timeout=100)
    want = merged_by_peft(base, tmp_path / "run/adapter")
    want = {name: want[name] for name in load_file(workplace / "model/model.safetensors")}
    tied = workplace.name.startswith("tied")
    changed = 6 + 5 + (1 if tied else 2)
    check_each_merge(tmp_path, base, want, changed)
    settings = written_as_exported(tmp_path / "run", tmp_path / "written")
    assert settings["ensure_weight_tying"] is tied


@pytest.mark.exhaustive(by=lambda contents: [])
@pytest.mark.parametrize("contents", ["adapters", "full"])
def test_a_run_in_two_halves_is_the_run_in_one(
    gloo_pool: GlooPool, tmp_path: Path, contents: str
) -> None:
    options = {
        "plugins.lora.modules_to_save": [*OURS, "router"],
        "plugins.lora.checkpoint": contents,
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
    }
    runs = Runs(gloo_pool, tmp_path, ({**MOE, **options}, 2, ("lora",)))
    runs.assert_the_same_in_two_halves()


LAYOUTS_OF_TRIALS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp=2": (2, {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}),
    "pp=2": (2, {"parallel.pipeline_model_parallel_size": 2}),
    "ep=2": (2, {"parallel.expert_model_parallel_size": 2}),
    "virtual stages": (
        2,
        {
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.virtual_pipeline_model_parallel_size": 2,
        },
    ),
}


@pytest.mark.exhaustive(by=lambda layout: [layout == "tp=2"])
@pytest.mark.parametrize("tied", [False, True], ids=["separate", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS_OF_TRIALS)
def test_every_gradient_is_that_of_one_rank(gloo_pool: GlooPool, layout: str, tied: bool) -> None:
    ranks, changes = LAYOUTS_OF_TRIALS[layout]
    modules = [n for n in (*OURS, "router") if not (tied and n == "output_layer")]
    config = {
        **MOE,
        "model.num_layers": 4,
        "model.share_embeddings_and_output_weights": tied,
        "plugins.lora.modules_to_save": modules,
    }
    plain, cut = (
        full_tensors(gloo_pool.run(run_trial, n, Trial(plugins=("lora",), config=values, steps=0)))
        for n, values in ((1, config), (ranks, {**config, **changes}))
    )
    assert cut.problems(1e-10) == []
    assert list(differences(cut.tensors, plain.tensors, 1e-10)) == []
    in_full = {name for name in plain.tensors if ".adapter." not in name}
    assert len(in_full) == 3 * 4 + (2 if tied else 3)


def test_the_plan_counts_the_modules() -> None:
    _, (adapters,) = planned(DENSE, ("lora",))
    config = {**DENSE, "plugins.lora.modules_to_save": OURS}
    _, (cost,) = planned(config, ("lora",))
    vocabulary, norms = 96 * 32, (2 * 2 + 1) * 32
    assert cost.trained_parameters == adapters.trained_parameters + 2 * vocabulary + norms
    assert cost.parameters == adapters.parameters
    assert cost.flops > adapters.flops
    assert cost.memory.optimizer > adapters.memory.optimizer


@pytest.mark.parametrize(
    ("modules", "model", "expected"),
    [
        (["embed_tokens"], {}, "names 'embed_tokens'; expected some of word_embeddings, output"),
        (["router"], {}, "names 'router'; expected some of word_embeddings"),
        (["k_layernorm"], {}, "names 'k_layernorm'; expected"),
        (["q_layernorm"], {**LATENT_MODEL, "q_lora_rank": None}, "names 'q_layernorm'; expected"),
        (["linear_qkv"], {}, "a linear that takes an adapter; expected it in plugins.lora.target"),
        (["final_layernorm"] * 2, {}, "names 'final_layernorm' twice; expected it once"),
        (
            ["output_layer"],
            {"share_embeddings_and_output_weights": True},
            "is tied to word_embeddings (model.share_embeddings_and_output_weights=true) and would",
        ),
    ],
)
def test_modules_that_cannot_be_trained_in_full_are_named(
    modules: list[str], model: dict[str, Any], expected: str
) -> None:
    (found,) = problems({"modules_to_save": tuple(modules)}, **model)
    assert expected in found


def test_a_family_without_names_for_a_module_does_not_export_it() -> None:
    options: dict[str, Any] = {"modules_to_save": ("router",)}
    deepseek = {**LATENT_MODEL, "family": "deepseek_v3", "num_moe_experts": 4}
    assert problems(options, **deepseek) == []
    (found,) = problems({**options, "export": True}, **deepseek)
    assert "not for router of deepseek_v3; leave it out" in found


def test_an_adapter_with_other_modules_says_which_to_name(tmp_path: Path) -> None:
    folder = write_header(tmp_path / "none")
    (found,) = problems({"load": folder, "modules_to_save": ("word_embeddings",)})
    assert "plugins.lora.modules_to_save=[word_embeddings], but the adapter in" in found
    assert found.endswith("has []; set plugins.lora.modules_to_save=[]")


def test_a_resumed_run_has_the_modules_of_its_checkpoint() -> None:
    config = RunConfig(
        run=RunSection(output_dir="runs/x"), model=model_fields(), parallel=parallel_fields()
    )
    stored = BaseRecord(config, LoraOptions()).state_dict()
    expected = "modules_to_save=['router'], but the checkpoint's adapters have []"
    for state in (stored, {k: v for k, v in stored.items() if k != "modules_to_save"}):
        BaseRecord(config, LoraOptions()).load_state_dict(state)
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            BaseRecord(config, LoraOptions(modules_to_save=("router",))).load_state_dict(state)


def test_the_base_is_no_reference_of_modules_that_train_in_place() -> None:
    """A second model is."""
    hooks = Hooks([Lora(LoraOptions(modules_to_save=("router",)))])

    def scopes(**frozen: Any) -> list[Any]:
        models = {"policy": SimpleNamespace(frozen=False, chunks=[]), **frozen}
        context = SimpleNamespace(models=models)
        return [*hooks.contributions("ascend_phase", context=context, phase=RunPhase.REFERENCE)]

    with pytest.raises(ConfigError, match=r"modules_to_save=router: the base cannot be the ref"):
        scopes()
    [(_, scope)] = scopes(reference=SimpleNamespace(frozen=True, chunks=[]))
    assert isinstance(scope(), type(switched_off([])))


def test_peft_has_no_missing_keys_of_a_router(gloo_pool: GlooPool, tmp_path: Path) -> None:
    base = write_mixtral(tmp_path / "base")
    run = {
        **base_values(base, model__family="mixtral"),
        "plugins.lora.target_modules": SAME,
        "plugins.lora.modules_to_save": ["router"],
        "run.output_dir": str(tmp_path / "run"),
        "data.train": [write_tokens(tmp_path / "tokens", VOCAB, 40, 1)],
        "train.train_iters": 1,
        "train.global_batch_size": 2,
    }
    gloo_pool.run(whole_run, 1, run, ("lora",), timeout=100)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        model = read_peft(base, tmp_path / "run/adapter")
    stored = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    held = trained(model)
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in stored.items())
    words = ("--adapter", tmp_path / "run/adapter", base, tmp_path / "merged")
    assert convert("--to", "hf", *words) == 0
