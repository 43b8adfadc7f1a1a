"""Texts of a model that trains are those of its checkpoints, and change no bit of the training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ascend_run import testing
from ascend_run.ops.generation.engine import Request
from ascend_run.ops.generation.sampling import Sampling
from ascend_run.plugin_api import Numerics
from ascend_run.plugin_api.implementations import claims_of
from ascend_run.plugins.logging.eval_generate import EvalGenerate
from ascend_run.testing.models import DENSE, MOE, trial_layout
from ascend_run.testing.parity import Parity
from ascend_run.testing.pool import GlooPool
from ascend_run.testing.runtime import Trial, run_trial
from ascend_run.testing.training_run import TrainingRun
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.generate.model import loaded_model
from ascend_run.tools.pages.run_folder import read_run
from ascend_run.tools.report.page import write_report
from ascend_run.types.layout import world_size
from tests.plugins.models.cases import BY_NAME
from tests.plugins.models.published import publish
from tests.support.generated import generated, write_words
from tests.support.no_network import no_network as no_network

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning"),
    pytest.mark.usefixtures("no_network"),
]

PROMPTS: Final = [[3, 1, 4, 1, 5], [2], [9] * 12, [*range(40, 52)], [7, 7]]
"""Two end with the model's longest text; there is an odd number in each step."""
NEW: Final = 8
OPTION: Final = "plugins.eval-generate"
WRITES: Final = {
    f"{OPTION}.prompt_ids": PROMPTS,
    f"{OPTION}.max_new_tokens": NEW,
    f"{OPTION}.interval": 1,
}
DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
SHARDED: Final = {
    "ddp.use_distributed_optimizer": True,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
}
DRAWS: Final = {f"{OPTION}.temperature": 1.5, f"{OPTION}.top_k": 40, f"{OPTION}.top_p": 0.9}
Layout = tuple[str, Mapping[str, int], tuple[str, ...], Mapping[str, Any]]
LAYOUTS: Final[Mapping[str, Layout]] = {
    "draws": ("dense", {}, (), {**DRAWS, f"{OPTION}.seed": 7}),
    "draws-experts": ("moe", {}, (), {**DRAWS, f"{OPTION}.seed": 8}),
    "dp": ("dense", {"dp": 2}, (), SHARDED),
    "tp-sp": ("dense", {"tp": 2}, (), DRAWS),
    "tp": ("dense", {"tp": 2}, (), {"parallel.sequence_parallel": False}),
    "pp": ("dense", {"pp": 2}, (), {}),
    "pp-vpp": ("dense", {"pp": 2, "vpp": 2}, (), {"model.num_layers": 4}),
    "cp-ulysses": ("dense", {"cp": 2}, ("ulysses",), {}),
    "cp-ring": ("dense", {"cp": 2}, ("ring-attention",), {}),
    "ep": ("moe", {"dp": 2, "ep": 2}, (), {}),
    "tp-sp-ep": ("moe", {"tp": 2, "ep": 2}, (), {}),
    "cp-ulysses-ep": ("moe", {"cp": 2, "ep": 2}, ("ulysses",), {}),
    "tp-sp-pp": ("dense", {"tp": 2, "pp": 2}, (), {}),
    "tp-sp-cp-ring": ("dense", {"tp": 2, "cp": 2}, ("ring-attention",), {}),
    "pp-vpp-dp-ep": (
        "moe",
        {"pp": 2, "vpp": 2, "dp": 2, "ep": 2},
        (),
        {**SHARDED, "model.num_layers": 4},
    ),
}


def written(run: TrainingRun) -> dict[int, list[list[int]]]:
    """Step -> the ids after each prompt, as the run's folder has them."""
    found: dict[int, list[list[int]]] = {}
    for line in (run.folder / "samples.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["step"], []).append(record["ids"])
    return found


def answered(
    folder: Path, step: int, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[list[int]]:
    """The ids that ``ascend-run generate`` puts after the prompts, by the checkpoint of a step."""
    with loaded_model(folder, SourceOptions(step=step)) as model:
        engine = model.engine(256)
        found: dict[int, list[int]] = {}
        for index, ids in enumerate(prompts):
            most = min(NEW, model.max_length - len(ids))
            own = sampling.of_prompt(index)
            request = Request(prompt=tuple(ids), max_new_tokens=most, sampling=own)
            found[engine.submit(request)] = []
        while not engine.is_idle:
            for one in engine.step():
                found[one.sequence].append(one.token)
    return [*found.values()]


def sampling_of(values: Mapping[str, Any]) -> Sampling:
    names = {"temperature", "top_k", "top_p", "seed"}
    given = {name: values[key] for name in names if (key := f"{OPTION}.{name}") in values}
    return Sampling(**given)


@pytest.mark.exhaustive(by=lambda name: name.split("-"))
@pytest.mark.parametrize("name", LAYOUTS)
def test_texts_are_those_of_generate_by_the_checkpoint_of_the_step(name: str) -> None:
    model, sizes, beside, more = LAYOUTS[name]
    values = {
        **(MOE if model == "moe" else DENSE),
        **trial_layout(sizes),
        **WRITES,
        **more,
        "checkpoint.save_interval": 1,
        "optimizer.lr": 0.05,
    }
    run = testing.run(["eval-generate", *beside], values, ranks=world_size(sizes), steps=2)
    found = written(run)
    assert [*found] == [1, 2]
    assert found[1] != found[2]
    assert [len(ids) for ids in found[1]] == [NEW, NEW, 4, 4, NEW]
    for step, ids in found.items():
        assert ids == answered(run.folder, step, PROMPTS, sampling_of(values))


@pytest.mark.exhaustive(by=lambda name: ())
@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "bloom", "deepseek_v3", "phimoe"])
def test_texts_of_other_positions_and_attention(name: str, tmp_path: Path) -> None:
    """Learned positions, windows with a base of their own, alibi, latent attention, longrope."""
    family = BY_NAME[name]
    model: Any = family.model(vocab_size=90)
    model.save_pretrained(tmp_path)
    if family.publish:
        publish(tmp_path, family.publish, model.config)
    values = {"model.hf_path": str(tmp_path), "model.family": name, **WRITES}
    run = testing.run("eval-generate", values, steps=1)
    assert written(run)[1] == answered(run.folder, 1, PROMPTS, Sampling())


@pytest.mark.exhaustive(by=lambda name: ())
@pytest.mark.parametrize(
    "name", ["draws", "draws-experts", "dp", "tp-sp", "pp-vpp", "cp-ulysses-ep"]
)
def test_no_bit_changes(parity: Parity, name: str) -> None:
    model, sizes, beside, more = LAYOUTS[name]
    config = {key: value for key, value in more.items() if not key.startswith(OPTION)}
    config |= {} if sizes else DROPOUT
    parity("eval-generate", beside=beside, model=model, layout=sizes, config=config, options=WRITES)


@pytest.mark.exhaustive(by=lambda sizes: ())
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"dp": 2}], ids=str)
def test_states_and_generators_stay_those_of_the_run_without(
    gloo_pool: GlooPool, tmp_path: Path, sizes: Mapping[str, int]
) -> None:
    """Weights, states of the optimizer and random generators, with dropout after the texts."""
    config = {**DENSE, **trial_layout(sizes), **DROPOUT}

    def trained(plugins: tuple[str, ...], options: Mapping[str, Any]) -> Any:
        folder = tmp_path / str(len(plugins))
        trial = Trial(
            plugins=plugins, config={**config, **options}, steps=3, checkpoints=str(folder)
        )
        return gloo_pool.run(run_trial, world_size(sizes), trial)

    both = zip(trained(("eval-generate",), {**WRITES, **DRAWS}), trained((), {}), strict=True)
    for mine, other in both:
        assert mine.losses == other.losses
        assert mine.values == other.values
        assert mine.state.keys() == other.state.keys()
        assert any("rng" in key or "random" in key for key in mine.state)
        for key, tensor in mine.state.items():
            assert torch.equal(tensor, other.state[key]), key


def test_texts_are_encoded_and_shown_in_the_report(tmp_path: Path) -> None:
    """Some end with the end of a document."""
    words = json.loads(write_words(tmp_path, 7).read_text())
    words["model"]["vocab"]["<|endoftext|>"] = 7
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "more").write_text("\n".join(f"w{n} w{n % 3}" for n in range(6)))
    texts = [{"text": f"w{n // 7} w{n % 7} w3"} for n in range(49)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, texts)))
    values = {
        "data.train": [str(tmp_path / "train.jsonl")],
        "data.tokenizer": str(tmp_path / "tokenizer.json"),
        "model.vocab_size": 8,
        "optimizer.lr": 0.01,
        f"{OPTION}.prompts": ["w3 w1"],
        f"{OPTION}.prompts_file": str(tmp_path / "more"),
        f"{OPTION}.prompt_ids": [[5]],
        f"{OPTION}.interval": 2,
        f"{OPTION}.max_new_tokens": NEW,
    }
    run = testing.run("eval-generate", values, steps=3)
    lines = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2] * 8 + [3] * 8
    assert [line["title"] for line in (lines[0], lines[6], lines[7])] == ["w3 w1", "w5 w2", "ids 5"]
    assert {line["values"]["end"] for line in lines} == {"stop", "length"}
    (tmp_path / "all").write_text("\n".join(line["title"] for line in lines[8:-1]))
    answers = generated(run.folder, "--prompts", tmp_path / "all", "--max-new-tokens", NEW)
    for line, answer in zip(lines[8:-1], answers, strict=True):
        assert line["values"] == {"step": 3, "text": answer["text"], "end": answer["finish"]}
        assert line["ids"] == answer["ids"]
    events = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    logged = [event for event in events if event["event"] == "eval_generate.text"]
    assert [event["text"] for event in logged] == [line["values"]["text"] for line in lines]
    write_report([read_run(run.folder)], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Texts of the model" in page
    for line in lines:
        assert escape(line["values"]["text"]) in page


def test_a_resumed_run_replaces_the_texts_of_later_steps() -> None:
    first = testing.run("eval-generate", {**WRITES, "checkpoint.save_interval": 2}, steps=2)
    lines = first.folder / "samples.jsonl"
    stale = {"step": 3, "title": "stale", "values": {"step": 3}, "ids": []}
    lines.write_text(lines.read_text() + json.dumps(stale) + '\n{"step": 4, "tit')
    found = written(first.resume(steps=1))
    assert [*found] == [1, 2, 3]
    assert [len(texts) for texts in found.values()] == [len(PROMPTS)] * 3


def test_declarations() -> None:
    assert claims_of(EvalGenerate) == ()
    assert EvalGenerate.manifest.numerics is Numerics.BITWISE
