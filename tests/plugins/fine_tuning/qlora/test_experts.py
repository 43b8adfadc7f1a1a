"""Adapters of routed experts beside a base whose linears are quantised, against PEFT's
``target_parameters`` on transformers' Mixtral whose projections bitsandbytes has quantised."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from ascend_run.testing.models import MOE
from ascend_run.testing.pool import GlooPool
from tests.core.train.runs import whole_run
from tests.plugins.fine_tuning.lora.lora_jobs import hf_names, run_once
from tests.plugins.fine_tuning.lora.peft_models import (
    peft_model,
    read_peft,
    trained,
    write_mixtral,
    write_peft,
)
from tests.plugins.fine_tuning.lora.peft_runs import train_with_peft, write_conversations
from tests.plugins.fine_tuning.lora.peft_runs import values as values_of_a_run
from tests.plugins.fine_tuning.lora.test_convert import convert, merged_by_peft
from tests.plugins.fine_tuning.lora.test_experts import ATTENTION, BOTH, OURS, mixtral_values
from tests.support.costs import planned
from tests.support.loaded_model import largest_difference
from tests.support.task_runs import STEPS

from .qlora_jobs import loaded_values, values_by_peer

BLOCK = 32
"""A row of every projection, so that rows have the same scales in whichever order they stand."""
ENABLE = ("lora", "qlora")
QUANTISED = {"plugins.qlora.blocksize": BLOCK, "plugins.qlora.use_double_quant": False}
TARGETS = {"target_modules": [*OURS, "experts"]}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a base with an adapter and conversations, and the same in ``peer`` with the values that
    bitsandbytes makes of the projections; experts and router are the same in both."""
    folder = tmp_path_factory.mktemp("qlora experts")
    base = Path(write_mixtral(folder / "model", vocab_size=400))
    write_conversations(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_peft(peft_model(base, targets=ATTENTION, target_parameters=BOTH), folder / "adapter")
    shutil.copytree(folder, folder / "peer")
    tensors = {
        name: values_by_peer(tensor, BLOCK, compressed=False) if "self_attn" in name else tensor
        for name, tensor in load_file(base / "model.safetensors").items()
    }
    save_file(tensors, folder / "peer/model/model.safetensors", metadata={"format": "pt"})
    return folder


def test_loss_and_every_gradient_are_pefts_on_bitsandbytes_weights(
    gloo_pool: GlooPool, workplace: Path
) -> None:
    rows = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    peer = read_peft(workplace / "peer/model", workplace / "adapter")
    logits = peer(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    expected = {name: p.grad for name, p in trained(peer).items()}

    run = mixtral_values(str(workplace / "model"), str(workplace / "adapter"), TARGETS)
    values = {**run, **QUANTISED}
    (outcome,) = gloo_pool.run(run_once, 1, values, tokens, labels, ENABLE, False, timeout=100)
    assert float(outcome.loss) == pytest.approx(float(loss.detach()), rel=1e-5)
    gradients = hf_names(outcome.gradients)
    assert gradients.keys() == expected.keys()
    assert sum(".mlp.experts" in name for name in gradients) == 2 * 4
    for name, gradient in gradients.items():
        assert largest_difference(gradient, expected[name]) < 1e-5, name
    (plain,) = gloo_pool.run(run_once, 1, run, tokens, labels, ("lora",), False)
    assert largest_difference(plain.logits_BSV, logits.detach()) > 1e-3, "quantisation counts"


def values(workplace: Path, output: Path, **changes: Any) -> Mapping[str, Any]:
    return {
        **values_of_a_run(workplace, output),
        "model.family": "mixtral",
        "model.moe_aux_loss_coeff": 0.0,
        "plugins.lora.target_modules": TARGETS["target_modules"],
        **QUANTISED,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


def test_ten_losses_and_the_merged_export_are_those_of_peft(
    gloo_pool: GlooPool, workplace: Path, tmp_path: Path
) -> None:
    """On two ranks with two experts each. The export has the base's experts with their updates, and
    the dequantised projections with theirs."""
    expected, _ = train_with_peft(workplace / "peer")
    run = values(
        workplace,
        tmp_path / "run",
        checkpoint__save_interval=STEPS,
        parallel__expert_model_parallel_size=2,
        train__micro_batch_size=2,
    )
    ended, _ = gloo_pool.run(whole_run, 2, run, (*ENABLE, "gmm"), timeout=100)
    assert [line["loss"] for line in ended.readings] == pytest.approx(expected, rel=1e-5)
    assert max(expected) - min(expected) > 0.1

    want = merged_by_peft(str(workplace / "peer/model"), tmp_path / "run/adapter")
    assert convert("--to", "hf", tmp_path / "run", tmp_path / "out") == 0
    got = read_merged(tmp_path / "out")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6)


def read_merged(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder by the names of transformers' model, which stacks experts."""
    from transformers import AutoModelForCausalLM

    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def test_only_linears_are_quantised(gloo_pool: GlooPool, workplace: Path, tmp_path: Path) -> None:
    run = values(workplace, tmp_path)
    (stored,) = gloo_pool.run(loaded_values, 1, run, ENABLE, timeout=100)
    linears = ("linear_qkv", "linear_proj")
    assert {*stored} == {
        f"decoder.layers.{layer}.self_attention.{name}.weight"
        for layer in range(2)
        for name in linears
    }


def test_the_plan_has_the_experts_and_their_sums_in_the_runs_dtype() -> None:
    """Of two layers, projections of 48 and 32 rows by 32: half a byte and a scale of float32 for 32
    weights, in place of float32. What adapters of experts add is what they add without qlora."""
    memory = {
        (targets, plugins): planned(
            {
                **MOE,
                **(QUANTISED if "qlora" in plugins else {}),
                "plugins.lora.target_modules": ["all-linear", *targets],
            },
            plugins,
        )[1][0].memory
        for targets in ((), ("experts",))
        for plugins in (("lora",), ENABLE)
    }
    for targets in ((), ("experts",)):
        plain, quantised = memory[targets, ("lora",)], memory[targets, ENABLE]
        numels = [2 * 32 * rows for rows in (48, 32)]
        saved = 4 * sum(numels) - sum(n // 2 + 4 * (n // 32) for n in numels)
        assert plain.weights - quantised.weights == saved
        assert plain.activations == quantised.activations
        assert plain.gradient_buffers == quantised.gradient_buffers
