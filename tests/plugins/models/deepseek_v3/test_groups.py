"""DeepSeek-V3 without groups of experts: transformers has one group then, or keeps them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ascend_run.prepare.hugging_face.config_keys import config_to_hf
from ascend_run.testing.pool import GlooPool
from ascend_run.tools.convert.model_config import config_of_hf, of_values
from ascend_run.tools.convert.verifying.settings import unequal
from tests.plugins.models.cases import BY_NAME
from tests.support.against_transformers import WIDE_TOLERANCE, Reference, check_one_rank

GROUPS, KEPT = "model.moe_router_num_groups", "model.moe_router_group_topk"


@pytest.mark.parametrize("groups", [None, 4])
def test_a_model_that_selects_from_all_experts_is_that_of_transformers(
    groups: int | None, gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """Its written config.json, logits and every gradient."""
    family = BY_NAME["deepseek_v3"]
    changes = {"n_group": groups or 1, "topk_group": groups or 1}
    model = family.model(torch.float64, **changes)
    reference = Reference(family.name, model, tmp_path / "theirs", family.in_our_layout)
    read = config_of_hf(tmp_path / "theirs", None)
    given = {f"model.{name}": read.config.model[name] for name in read.stated}
    ours = of_values(family.name, {**given, GROUPS: groups, KEPT: None}, "the test")
    assert [*unequal(ours.config, read.config)] == []
    written = config_to_hf(ours.family, ours.config)
    assert {name: written[name] for name in changes} == changes
    overrides = [f"{GROUPS}={groups or 'none'}", f"{KEPT}=none"]
    check_one_rank(reference, gloo_pool, overrides, WIDE_TOLERANCE)


@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (2, 1)])
def test_groups_that_leave_experts_out_are_another_setting(groups: int, kept: int) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    values = {f"model.{name}": size for name, size in sizes.items()}
    values |= {"model.num_moe_experts": 8, "model.moe_router_topk": 2}
    without = of_values("deepseek_v3", values, "the test").config
    grouped = of_values("deepseek_v3", {**values, GROUPS: groups, KEPT: kept}, "the test").config
    assert {name for name, _ in unequal(without, grouped)} == {
        "moe_router_num_groups",
        "moe_router_group_topk",
    }
