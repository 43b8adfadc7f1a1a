"""A family against transformers: it agrees, a wrong map is found, and what is lacking is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import pytest
import torch

from ascend_run.plugin_api import ModelFamily
from ascend_run.prepare.prepare import PreparedRun
from ascend_run.testing.hugging_face.ties import TiesByIndex
from ascend_run.testing.models import samples
from ascend_run.testing.oracle.model import GPT
from ascend_run.tools.convert.model_config import load_family
from ascend_run.tools.verify import second_oracle
from ascend_run.tools.verify.capture.record import Record, RecordedShard
from ascend_run.tools.verify.compare.verdict import Phase
from ascend_run.tools.verify.oracle import what_the_oracle_lacks
from ascend_run.tools.verify.questions import Question
from ascend_run.tools.verify.second_oracle import FamilyComparison, compare_with_transformers
from ascend_run.tools.verify.sides import sides_of
from tests.support.tiny_families import FAMILIES, tiny_run

LACKING: Final = frozenset(
    {
        "aquila",
        "baichuan",
        "baichuan2",
        "baichuan2_13b",
        "baichuan_13b",
        "chatglm",
        "grok1",
        "internlm",
        "internlm2",
        "internlm3",
        "minicpm",
        "minicpm_moe",
        "qwen",
    }
)
"""Families that transformers has no class of; a family of each other name is compared."""


ROUTER: Final = ".mlp.router.weight"
WITH_EXPERTS: Final = (
    "deepseek",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "mixtral",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
)
"""Names of families with experts that transformers has."""


def record_of(prepared: PreparedRun, ties: bool = False) -> Record:
    """Return what the comparison reads of a plain run: random weights, and samples.

    Args:
        ties: The experts' scores are one product each, and those of all but the first are equal.
    """
    config = prepared.config
    torch.manual_seed(1)
    weights = {n: 0.3 * torch.randn_like(p) for n, p in GPT(config).named_parameters()}
    for name in weights:
        if ties and name.endswith((ROUTER, ROUTER.replace("weight", "bias"))):
            weights[name][1:] = weights[name][1]
        if ties and name.endswith(ROUTER):
            weights[name][:, 1:] = 0.0
    places = [
        RecordedShard(name=n, offset=(0,) * w.ndim, global_shape=tuple(w.shape), trains=True)
        for n, w in weights.items()
    ]
    keys = {"model.vocab_size": config.model.vocab_size, "data.seq_length": 16}
    rows = samples(keys, 4)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return Record(
        rank=0,
        coordinates={},
        sizes={},
        places=places,
        initial=[*weights.values()],
        first_samples=batch,
    )


def compared(prepared: PreparedRun) -> FamilyComparison:
    return compare_with_transformers(prepared, record_of(prepared))


def assert_equal(found: FamilyComparison) -> None:
    assert {check.name: check.state for check in found.checks} == {"loss": "ok", "gradients": "ok"}
    assert found.fault is None
    assert not found.note


@pytest.mark.exhaustive(by=lambda name: [name in LACKING])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_compared_or_said_to_be_unknown(name: str) -> None:
    prepared = tiny_run(name)
    assert what_the_oracle_lacks(prepared) == ()
    found = compared(prepared)
    if name not in LACKING:
        assert_equal(found)
        return
    assert [check.state for check in found.checks] == ["-"]
    assert "not compared with transformers: transformers" in found.note


def test_families_with_experts_are_those_with_a_router() -> None:
    routed = {name for name in FAMILIES if tiny_run(name).config.model.num_moe_experts}
    assert routed - LACKING == {*WITH_EXPERTS}


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_equal_scores_are_selected_by_index_in_transformers(name: str) -> None:
    """Most tokens have equal scores of an expert that is selected and one that is not."""
    prepared = tiny_run(name)
    assert_equal(compare_with_transformers(prepared, record_of(prepared, ties=True)))


@pytest.mark.parametrize("name", ["deepseek", "deepseek_v2", "deepseek_v3"])
def test_a_built_in_model_of_latent_attention_is_compared(name: str) -> None:
    """It has experts, and no shared ones, of which transformers has empty tensors."""
    sides = sides_of(Question(layout={}, overrides=(f"model.family={name}",)))
    assert sides.has_second_oracle
    model = (prepared := sides.plain.prepare()).config.model
    assert (model.num_moe_experts, model.moe_shared_expert_intermediate_size) == (4, None)
    assert_equal(compared(prepared))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [0, -1])
def test_topk_selects_equal_entries_by_index(dim: int, largest: bool) -> None:
    torch.manual_seed(0)
    distinct = torch.randperm(60).double().view(6, 10).requires_grad_()
    expected = torch.topk(distinct, 3, dim, largest)
    with TiesByIndex():
        found = torch.topk(distinct, k=3, dim=dim, largest=largest, sorted=False)
        of_equal = torch.zeros(6, 100).topk(3, dim=-1).indices
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    weights = torch.rand_like(found.values)
    of_both = [torch.autograd.grad((x.values * weights).sum(), distinct) for x in (found, expected)]
    assert torch.equal(*(gradient for (gradient,) in of_both))
    assert (of_equal == torch.arange(3)).all()


@pytest.mark.needs_plugins("lora", "eod-reset")
@pytest.mark.parametrize(
    ("name", "enable", "more"),
    [
        ("deepseek_v3", (), {"model.mtp_num_layers": 1, "model.moe_z_loss_coeff": 0.1}),
        (
            "mixtral",
            ("lora", "eod-reset"),
            {"plugins.eod-reset.document_length": 5, "model.moe_aux_loss_coeff": 0.1},
        ),
    ],
)
def test_features_and_losses_of_megatron_are_left_out(
    name: str, enable: tuple[str, ...], more: Mapping[str, Any]
) -> None:
    assert_equal(compared(tiny_run(name, enable, **more)))


def _renamed(family: ModelFamily, names: Mapping[str, str]) -> ModelFamily:
    tensors = [
        attrs.evolve(one, hf=tuple(names.get(name, name) for name in one.hf))
        for one in family.tensors
    ]
    return attrs.evolve(family, tensors=tuple(tensors))


def _swapped_norms(family: ModelFamily) -> ModelFamily:
    q, k = (f"model.layers.{{layer}}.self_attn.{name}_norm.weight" for name in "qk")
    return _renamed(family, {q: k, k: q})


def _another_key(family: ModelFamily) -> ModelFamily:
    keys = [
        attrs.evolve(key, hf="layer_norm_eps") if key.hf == "rms_norm_eps" else key
        for key in family.keys
    ]
    return attrs.evolve(family, keys=tuple(keys))


def _misspelt(family: ModelFamily) -> ModelFamily:
    return _renamed(family, {"model.norm.weight": "model.morn.weight"})


@pytest.mark.parametrize(
    ("change", "failed"),
    [(_swapped_norms, "loss"), (_another_key, "loss"), (_misspelt, "weights")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_map_of_a_family_is_found(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[ModelFamily], ModelFamily], failed: str
) -> None:
    prepared = tiny_run("qwen3")
    wrong = change(load_family("qwen3"))
    monkeypatch.setattr(second_oracle, "load_family", lambda name: wrong)
    found = compared(prepared)
    assert failed in [check.name for check in found.checks if not check.passed]
    assert found.fault is not None
    assert (found.fault.phase, found.fault.module) == (Phase.FORWARD, "family qwen3")


@pytest.mark.needs_plugins("alibi", "noop-layers")
@pytest.mark.parametrize(
    ("name", "enable", "more", "reason"),
    [
        ("llama", ("noop-layers",), {"plugins.noop-layers.layers": [1]}, "it has no noop-layers"),
        ("llama", (), {"model.activation": "gelu"}, "model.activation is 'gelu'"),
    ],
)
def test_a_model_that_transformers_lacks_is_named(
    name: str, enable: tuple[str, ...], more: Mapping[str, Any], reason: str
) -> None:
    (check,), note = (found := compared(tiny_run(name, enable, **more))).checks, found.note
    assert check.state == "-"
    assert reason in note


def test_a_family_that_the_user_chose_is_compared() -> None:
    assert not sides_of(Question(layout={})).has_second_oracle
    given = {"model.family": "qwen3"}
    assert sides_of(Question(layout={}, config=given)).has_second_oracle
    assert sides_of(Question(layout={}, overrides=("model.family=qwen3",))).has_second_oracle
