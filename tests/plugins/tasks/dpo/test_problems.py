"""What keeps a run on pairs from starting, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_run.plugin_api import ConfigError
from ascend_run.prepare.prepare import PreparedRun
from tests.support.chats import CHATML, write_lines, write_tokenizer
from tests.support.preference_files import preferences
from tests.support.small_runs import prepare
from tests.support.tiny_llama import write_llama


def prepared(folder: Path, *enable: str, **changes: Any) -> PreparedRun:
    """Prepare a run that is right but for the changes."""
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
    return prepare(values, enable, 1)


def problems_of(folder: Path, **changes: Any) -> list[str]:
    """Return what is wrong with such a run."""
    try:
        prepared(folder, **changes)
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
    "nothing to compute": (
        {"plugins__dpo__reference_free": True, "plugins__dpo__precompute_ref_log_probs": True},
        "dpo: plugins.dpo.precompute_ref_log_probs=true has nothing to compute with",
    ),
    "tokens dropped by what else is there": (
        {
            **EXPERTS,
            "model__moe_expert_capacity_factor": 1.0,
            "plugins__dpo__precompute_ref_log_probs": True,
            "train__micro_batch_size": 2,
            "train__global_batch_size": 2,
        },
        "dpo: model.moe_expert_capacity_factor=1.0 drops tokens by what else is in a micro-batch",
    ),
    "routing in training alone": (
        {
            **EXPERTS,
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
            "data__seq_length": 160,
        },
        "dpo: model.rope_scaling_type=dynamic turns every token of a row of more than 128 tokens",
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


def test_a_scaling_that_no_document_reaches_is_no_problem(tmp_path: Path) -> None:
    changes, _ = CASES["scaling of the reference alone"]
    assert problems_of(tmp_path, model__max_position_embeddings=64, **changes) == []


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_llama(tmp_path / "model", vocab_size=512)


BROKEN = {
    "[1]": "expected a JSON object, found list",
    "{": "not valid JSON",
    '{"model_type": "gpt2"}': "model_type is 'gpt2'; the family 'llama' was chosen",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_reference_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    folder = other_model(tmp_path / "other", text)
    (found,) = problems_of(tmp_path, plugins__dpo__reference=folder)
    assert found.startswith(f"dpo: plugins.dpo.reference={folder}: ")
    assert BROKEN[text] in found


def test_a_reference_that_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    (found,) = problems_of(tmp_path, plugins__dpo__reference=str(folder))
    assert f"no Hugging Face folder at {folder}" in found


def rewritten(folder: str, **changes: Any) -> str:
    """Return a folder of the same model but for these keys of its config.json."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return other_model(Path(f"{folder}-other"), json.dumps(config | changes))


ROPE = {"rope_theta": 500000.0, "rope_type": "default"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rope base": ({"rope_parameters": ROPE}, ["rotary_base is 500000.0 there and 10000.0 here"]),
    "rope scaling": (
        {"rope_parameters": LLAMA3},
        ["rope_scaling_type is 'llama3' there and none here", "rope_scaling_factor is 8.0 there"],
    ),
    "epsilon": ({"rms_norm_eps": 1e-5}, ["layernorm_epsilon is 1e-05 there and 1e-06 here"]),
    "heads": (
        {"num_key_value_heads": 4, "head_dim": 4},
        ["num_query_groups is 4 there and 2 here", "kv_channels is 4 there and 8 here"],
    ),
    "embeddings": (
        {"tie_word_embeddings": True},
        ["share_embeddings_and_output_weights is true there and false here"],
    ),
    "sizes": (
        {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3},
        ["vocab_size is 128 there and 512 here", "hidden_size is 64", "num_layers is 3"],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("written_out", [False, True])
def test_all_that_differs_in_a_reference_is_named(
    tmp_path: Path, model: str, case: str, written_out: bool
) -> None:
    """Also if the policy is not loaded from a folder."""
    changes, wanted = OTHERS[case]
    own = {
        "model__family": "llama",
        "model__num_layers": 2,
        "model__num_query_groups": 2,
        "model__ffn_hidden_size": 48,
        "model__layernorm_epsilon": 1e-6,
        "model__max_position_embeddings": 128,
        **({} if written_out else {"model__hf_path": model}),
    }
    assert problems_of(tmp_path, plugins__dpo__reference=model, **own) == []
    folder = rewritten(model, **changes)
    (found,) = problems_of(tmp_path, plugins__dpo__reference=folder, **own)
    assert found.startswith(f"dpo: plugins.dpo.reference={folder} holds another model, and")
    assert all(f"model.{one}" in found for one in wanted), found
    assert found.count(" there and ") >= len(wanted)


def test_what_a_loaded_reference_does_not_use_may_differ(tmp_path: Path, model: str) -> None:
    folder = rewritten(
        model, attention_dropout=0.5, initializer_range=0.3, max_position_embeddings=4096
    )
    changes = {"model__family": "llama", "model__hf_path": model, "model__num_layers": 2}
    assert problems_of(tmp_path, plugins__dpo__reference=folder, **changes) == []


def test_a_checkpoint_needs_a_reference_also_beside_a_folder(tmp_path: Path) -> None:
    """The reference would have the folder's weights, and the policy the checkpoint's."""
    folder = write_llama(tmp_path / "model", vocab_size=512, num_hidden_layers=1)
    changes = {"model__family": "llama", "model__hf_path": folder}
    assert problems_of(tmp_path, **changes) == []
    found = problems_of(tmp_path, checkpoint__load="runs/sft/checkpoints", **changes)
    assert any(one.startswith("dpo: the policy begins with checkpoint.load=") for one in found)


@pytest.mark.needs_plugins("lora")
def test_the_base_of_adapters_is_the_default_reference(tmp_path: Path) -> None:
    """Unless the run names another, or has none; ``plan`` shows where the value is from."""

    def shown(*enable: str, **changes: Any) -> tuple[object, str]:
        key = "plugins.dpo.reference"
        run = prepared(tmp_path, *enable, **changes)
        return run.config.plugins["dpo"].reference, run.plan.origins[key]

    model = write_llama(tmp_path / "model", vocab_size=512, num_hidden_layers=1)
    loaded = {"model__family": "llama", "model__hf_path": model}
    assert shown("lora") == ("base", "plugin 'dpo'")
    assert shown() == (None, "plugin default")
    assert shown("lora", plugins__dpo__reference_free=True) == (None, "plugin default")
    named = shown("lora", plugins__dpo__reference=model, **loaded)
    assert named == (model, "the test")


@pytest.mark.needs_plugins("lora")
def test_modules_that_train_in_place_are_no_base(tmp_path: Path) -> None:
    """Said before any rank starts; a second model may be the reference beside them."""
    model = write_llama(tmp_path / "model", vocab_size=512, num_hidden_layers=1)
    changes = {
        "model__family": "llama",
        "model__hf_path": model,
        "plugins__lora__modules_to_save": ["word_embeddings", "output_layer"],
    }
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path, "lora", **changes)
    (problem,) = caught.value.problems
    assert problem == (
        "dpo: plugins.dpo.reference=base is no reference with plugins.lora.modules_to_save="
        "word_embeddings,output_layer, which are trained in place; leave these out, or name a "
        "Hugging Face folder in plugins.dpo.reference"
    )
    prepared(tmp_path, "lora", **changes, plugins__dpo__reference=model)


def test_everything_is_said_at_once(tmp_path: Path) -> None:
    found = problems_of(
        tmp_path,
        data__train=[],
        data__tokenizer=None,
        plugins__dpo__loss="ipo",
        plugins__dpo__label_smoothing=0.1,
    )
    assert len(found) == 3
