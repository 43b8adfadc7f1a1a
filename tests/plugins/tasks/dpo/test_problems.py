"""What keeps a run on pairs from starting, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError
from tests.support.chats import CHATML, write_lines, write_tokenizer
from tests.support.preference_files import preferences
from tests.support.small_runs import prepare
from tests.support.tiny_llama import write_llama


def problems_of(folder: Path, **changes: Any) -> list[str]:
    """Return what is wrong with a run that is right but for the changes."""
    write_tokenizer(folder / "tokenizer", CHATML)
    values = {
        "task": "dpo",
        "run.output_dir": str(folder / "run"),
        "model.num_layers": 1,
        "model.hidden_size": 32,
        "model.num_attention_heads": 4,
        "model.vocab_size": 512,
        "data.train": [write_lines(folder / "pairs.jsonl", preferences(4))],
        "data.tokenizer": str(folder / "tokenizer"),
        "data.seq_length": 96,
        "train.eval_interval": 0,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    try:
        prepare(values, (), 1)
    except ConfigError as error:
        return list(error.problems)
    return []


def other_model(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return str(folder)


def test_a_run_that_is_right_starts(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == []


EXPERTS = {"model__family": "mixtral", "model__num_moe_experts": 4}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no files": ({"data__train": []}, "dpo: data.train is empty; name files of pairs"),
    "no held-out files": (
        {"train__eval_interval": 5},
        "dpo: train.eval_interval is 5, but data.validation is empty",
    ),
    "no tokenizer": ({"data__tokenizer": None}, "dpo: data.tokenizer is missing"),
    "smoothing of hinge": (
        {"plugins__dpo__loss": "hinge", "plugins__dpo__label_smoothing": 0.1},
        "dpo: plugins.dpo.label_smoothing=0.1 has no meaning with plugins.dpo.loss=hinge",
    ),
    "division by 0": (
        {"plugins__dpo__loss": "robust", "plugins__dpo__label_smoothing": 0.5},
        "dpo: plugins.dpo.label_smoothing=0.5 divides by 0 with plugins.dpo.loss=robust",
    ),
    "a reference that is not used": (
        {"plugins__dpo__reference": "models/a", "plugins__dpo__reference_free": True},
        "dpo: plugins.dpo.reference=models/a is not used with plugins.dpo.reference_free=true",
    ),
    "a policy from a checkpoint": (
        {"checkpoint__load": "runs/sft/checkpoints"},
        "dpo: the policy begins with checkpoint.load=runs/sft/checkpoints, which the reference",
    ),
    "the base of no adapters": (
        {"plugins__dpo__reference": "base"},
        "dpo: plugins.dpo.reference=base is the policy without its adapters",
    ),
    "routing in training alone": (
        {
            **EXPERTS,
            "model__moe_aux_loss_coeff": 0.0,
            "model__moe_router_load_balancing_type": "sinkhorn",
            "model__moe_router_topk": 1,
        },
        "dpo: model.moe_router_load_balancing_type=sinkhorn routes in training alone",
    ),
    "scaling of the reference alone": (
        {
            "model__log_n_scaling_length": 64,
            "model__log_n_scaling_in_training": False,
        },
        "dpo: model.log_n_scaling_length=64 scales the reference alone",
    ),
    "angles by the length of a row": (
        {
            "model__rope_scaling_type": "dynamic",
            "model__rope_scaling_factor": 2.0,
            "model__max_position_embeddings": 128,
        },
        "dpo: model.rope_scaling_type=dynamic depends on the length of a row",
    ),
    "a balancing loss": (
        {**EXPERTS, "model__moe_aux_loss_coeff": 0.01},
        "dpo: model.moe_aux_loss_coeff=0.01 is a sum over tokens",
    ),
    "a router's z-loss": (
        {**EXPERTS, "model__moe_aux_loss_coeff": 0.0, "model__moe_z_loss_coeff": 0.001},
        "dpo: model.moe_z_loss_coeff=0.001 is a sum over tokens",
    ),
    "further tokens": (
        {"model__mtp_num_layers": 1},
        "dpo: model.mtp_num_layers=1 predicts further tokens",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_problem_is_named(tmp_path: Path, case: str) -> None:
    changes, wanted = CASES[case]
    found = problems_of(tmp_path, **changes)
    assert any(one.startswith(wanted) for one in found), found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (json.dumps({"vocab_size": 128}), "has a vocabulary of 128, and this model one of 512"),
        ("[1]", "has a vocabulary of None, and this model one of 512"),
        ("{", "its config.json cannot be read"),
    ],
)
def test_another_reference_has_the_same_vocabulary(tmp_path: Path, text: str, wanted: str) -> None:
    folder = other_model(tmp_path / "other", text)
    (found,) = problems_of(tmp_path, plugins__dpo__reference=folder)
    assert found.startswith(f"dpo: plugins.dpo.reference={folder}")
    assert wanted in found


def test_a_reference_that_is_not_there(tmp_path: Path) -> None:
    (found,) = problems_of(tmp_path, plugins__dpo__reference=str(tmp_path / "none"))
    assert "its config.json cannot be read" in found


def test_a_checkpoint_needs_a_reference_also_beside_a_folder(tmp_path: Path) -> None:
    """The reference would have the folder's weights, and the policy the checkpoint's."""
    folder = write_llama(tmp_path / "model", vocab_size=512, num_hidden_layers=1)
    changes = {"model__family": "llama", "model__hf_path": folder}
    assert problems_of(tmp_path, **changes) == []
    found = problems_of(tmp_path, checkpoint__load="runs/sft/checkpoints", **changes)
    assert any(one.startswith("dpo: the policy begins with checkpoint.load=") for one in found)


def test_everything_is_said_at_once(tmp_path: Path) -> None:
    found = problems_of(
        tmp_path,
        data__train=[],
        data__tokenizer=None,
        plugins__dpo__loss="ipo",
        plugins__dpo__label_smoothing=0.1,
    )
    assert len(found) == 3
