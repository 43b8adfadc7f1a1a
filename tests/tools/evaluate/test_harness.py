"""Requests of lm-evaluation-harness, by a stub of it; ``lm_eval_parity`` has the real one."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from ascend_run.plugin_api import ConfigError
from ascend_run.testing.hugging_face.widened import computing_in
from ascend_run.text.templates import ChatTemplate
from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.evaluate.comparing import compared
from ascend_run.tools.evaluate.harness.adapter import open_lm
from ascend_run.tools.evaluate.harness.requests import HarnessModel, rolling_rows
from ascend_run.tools.evaluate.harness.running import scores_of
from ascend_run.tools.evaluate.page import render_page
from ascend_run.tools.evaluate.printing import lines_of
from ascend_run.tools.evaluate.results import HarnessScore, Results
from ascend_run.tools.evaluate.storing import read_results, write_results
from ascend_run.tools.generate.model import loaded_model
from ascend_run.tools.generate.texts import open_texts

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")
SCORE = HarnessScore(
    task="toy", metric="acc", filter="none", value=0.25, error=0.125, shots=2, questions=4
)


@pytest.fixture
def harness(folder: Path) -> Iterator[HarnessModel]:
    texts = open_texts(None, [folder], None)
    with loaded_model(folder, SourceOptions(), torch.float64) as model:
        yield HarnessModel.of(model, texts)


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    with computing_in(torch.float64), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def test_windows_are_those_of_lm_eval() -> None:
    """The example of its ``loglikelihood_rolling``: the last one has as much context as fits."""
    rows = [*rolling_rows(range(10), 99, 4)]
    assert [(list(row.ids[:-1]), list(row.ids[-row.num_scored :])) for row in rows] == [
        ([99, 0, 1, 2], [0, 1, 2, 3]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([5, 6, 7, 8], [8, 9]),
    ]
    assert [(list(row.ids), row.num_scored) for row in rolling_rows([5, 6], 9, 4)] == [
        ([9, 5, 6], 2)
    ]
    assert [*rolling_rows([], 9, 4)] == []


def test_a_continuation_is_scored_and_is_greedy_or_not(folder: Path, harness: HarnessModel) -> None:
    context = [3, 9, 4, 30, 31]
    logits = logits_of(folder, context)
    best, other = int(logits[-1].argmax()), int(logits[-1].argmin())
    found = harness.log_likelihoods([(context, [best]), (context, [other]), (context[:4], [31])])
    scores = logits.log_softmax(-1)
    wanted = [(scores[-1, best], True), (scores[-1, other], False)]
    wanted.append((scores[3, 31], int(logits[3].argmax()) == 31))
    for (got, greedy), (score, right) in zip(found, wanted, strict=True):
        assert abs(got - float(score)) < 1e-10
        assert greedy == right


def test_a_context_that_is_too_long_loses_its_begin(folder: Path, harness: HarnessModel) -> None:
    ids = [(7 * n) % 290 for n in range(150)]
    (found,) = harness.log_likelihoods([(ids[:-2], ids[-2:])])
    scores = logits_of(folder, ids[-129:-1]).log_softmax(-1)
    assert abs(found[0] - float(scores[-2, ids[-2]] + scores[-1, ids[-1]])) < 1e-10


def test_an_answer_ends_before_its_stop_words(harness: HarnessModel) -> None:
    whole = harness.answers([("the quick", {"max_gen_toks": 8, "until": None})])[0]
    assert len(whole) > 6
    given = [("the quick", {"until": [whole[4:6], "never"], "max_new_tokens": 8})]
    given += [("the quick", {"until": whole[2:4], "do_sample": False, "max_tokens": 9})]
    assert harness.answers(given) == [whole.split(whole[4:6])[0], whole.split(whole[2:4])[0]]
    drawn = {"do_sample": True, "temperature": 5.0, "max_gen_toks": 6}
    assert len({*harness.answers([("the quick", drawn)] * 3)}) > 1


def test_what_lm_eval_may_not_ask_for_is_one_message(harness: HarnessModel) -> None:
    for settings, message in (
        ({"max_gen_toks": 128}, "asks for 128 new tokens; expected 1 to 127, since the model's"),
        ({"num_beams": 4}, "num_beams: expected one of until, do_sample, max_gen_toks"),
        ({"do_sample": True, "top_p": 2.0}, "top_p 2.0: expected a number from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            harness.answers([("the", settings)])
    for context, continuation, message in (
        ([], [3], "asks for 1 tokens after 0; expected 1 to 128 after at least one"),
        ([1], [], "asks for 0 tokens after 1"),
        ([1], [300], "a text has the token id 300, and the model's vocabulary has 298 ids"),
    ):
        with pytest.raises(ConfigError, match=message):
            harness.log_likelihoods([(context, continuation)])


def test_special_tokens_are_added_once(harness: HarnessModel) -> None:
    """What a text spells at its begin is not added again."""
    backend = harness.texts.tokenizer.backend
    begin = attrs.evolve(harness, begin_id=harness.end_id)
    assert begin.prefix_id == harness.prefix_id == backend.token_to_id("<|endoftext|>")
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin.prefix_id)]
    )
    plain = begin.encode("the", special=False)
    assert begin.encode("<|endoftext|>the") == begin.encode("the") == [begin.prefix_id, *plain]


def test_a_chat_is_rendered_to_its_end_or_into_it(harness: HarnessModel) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}>{{ m.content | trim }}.{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    template = ChatTemplate(source=source, name="t", variables={}, date=None)
    chatting = attrs.evolve(harness, template=template)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "the "}]
    assert chatting.chat(messages, prompt=True) == "<user>the.<a>"
    assert chatting.chat(messages, prompt=False) == "<user>the"
    whole = ChatTemplate(source=source.replace(" | trim", ""), name="t", variables={}, date=None)
    kept = attrs.evolve(harness, template=whole).chat(messages, prompt=False)
    assert kept == "<user>the "
    with pytest.raises(ConfigError, match="has no chat template; say --form chat"):
        harness.chat(messages, prompt=True)
    broken = ChatTemplate(source="{{ raise_exception('no') }}", name="t", variables={}, date=None)
    with pytest.raises(ConfigError, match="the chat template refuses the messages: "):
        attrs.evolve(harness, template=broken).chat(messages, prompt=True)


class Stub:
    """The parts of lm-eval that are used: one task, "toy", of three kinds of requests."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def modules(self) -> dict[str, ModuleType]:
        stub = self

        class TemplateLM:
            cache_hook = SimpleNamespace(add_partial=lambda *arguments: None)

            def loglikelihood(self, requests: Any) -> Any:
                lm: Any = self
                pairs = []
                for context, continuation in (request.args for request in requests):
                    whole, first = (
                        lm.tok_encode(context + continuation),
                        lm.tok_encode(context),
                    )
                    pairs.append(((context, continuation), first, whole[len(first) :]))
                return lm._loglikelihood_tokens(pairs, disable_tqdm=True)

        class TaskManager:
            all_tasks = ("toy", "broken")

            def __init__(self, include_path: str | None, include_defaults: bool) -> None:
                stub.asked["manager"] = (include_path, include_defaults)

            def load(self, names: list[str]) -> None:
                if "broken" in names:
                    raise KeyError("text")

        def simple_evaluate(model: Any, **options: Any) -> dict[str, Any]:
            stub.asked["options"] = options
            request = [SimpleNamespace(args=("the", " fox")), SimpleNamespace(args=("the", " dog"))]
            scores = [score for score, _ in model.loglikelihood(request)]
            (rolling,) = model.loglikelihood_rolling([SimpleNamespace(args=("the quick fox",))])
            settings = {"until": ["."], "max_gen_toks": 3}
            texts = model.generate_until([SimpleNamespace(args=("the", settings))])
            stub.asked["answers"] = (scores, rolling, texts, model.eot_token_id)
            values = {"alias": "toy", "acc,none": scores[0], "acc_stderr,none": "N/A"}
            return {
                "results": {"toy": values | {"ppl,none": rolling, "ppl_stderr,none": 0.5}},
                "n-shot": {"toy": 2},
                "n-samples": {"toy": {"original": 9, "effective": 4}},
            }

        contents = {
            "lm_eval": {"simple_evaluate": simple_evaluate},
            "lm_eval.api": {},
            "lm_eval.api.model": {"TemplateLM": TemplateLM},
            "lm_eval.tasks": {"TaskManager": TaskManager},
        }
        found = {}
        for name, content in contents.items():
            found[name] = ModuleType(name)
            vars(found[name]).update(content)
        return found


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    made = Stub()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_the_command_runs_its_tasks(
    folder: Path, tmp_path: Path, stub: Stub, evaluate: Callable[..., Any]
) -> None:
    words = [folder, "--lm-eval", "toy", "--lm-eval-tasks", tmp_path, "--shots", 2, "--limit", 4]
    acc, ppl = evaluate(*words)["lm_eval"]
    assert stub.asked["manager"] == (str(tmp_path), False)
    options = stub.asked["options"]
    assert options["apply_chat_template"] is False
    assert (options["tasks"], options["num_fewshot"], options["limit"]) == (["toy"], 2, 4)
    scores, rolling, texts, _ = stub.asked["answers"]
    assert (acc["value"], acc["error"], acc["shots"], acc["questions"]) == (scores[0], None, 2, 4)
    assert (ppl["metric"], ppl["value"], ppl["error"]) == ("ppl", rolling, 0.5)
    with open_lm(folder, dtype="fp64") as lm:
        request = SimpleNamespace(args=("the quick fox",))
        assert lm.loglikelihood_rolling([request]) == [rolling]
        assert lm.tokenizer_name == str(folder / "tokenizer.json")
        assert (lm.max_length, lm.prefix_token_id) == (128, lm.eot_token_id)
    assert scores[0] != scores[1]
    assert len(texts) == 1


def test_scores_are_shown_stored_and_compared(tmp_path: Path) -> None:
    a, b = (Results(model=name, harness=(attrs.evolve(SCORE, value=value),))
            for name, value in (("a", 0.25), ("b", 0.75)))  # fmt: skip
    write_results(a, tmp_path / "new", written=0.0)
    assert read_results(tmp_path / "new") == a
    header, _, row = lines_of(a)
    assert header.split() == ["task", "questions", "shots", "filter", "metric", "value", "error"]
    assert row.split() == ["toy", "4", "2", "none", "acc", "0.2500", "0.1250"]
    page = render_page(a, written=0.0)
    assert "lm-evaluation-harness" in page
    assert "0.2500" in page
    found = compared(a, b)
    assert [*found.lines()][-1].split() == ["toy", "none", "acc", "0.2500", "0.7500", "+0.5000"]
    assert json.loads(json.dumps(found.record()))["metrics"][0]["b"] == 0.75
    other = attrs.evolve(b, harness=(SCORE, attrs.evolve(SCORE, shots=0)))
    assert compared(a, other).notes == (
        "toy none acc of 4 questions after 0 examples: in B, and not in A",
    )
    nan = attrs.evolve(SCORE, value=float("nan"))
    write_results(Results(model="a", harness=(nan,)), tmp_path / "nan", written=0.0)
    assert '"value": null' in (tmp_path / "nan" / "results.json").read_text()
    (read,) = read_results(tmp_path / "nan").harness
    assert read.value != read.value


def test_metrics_are_read_from_its_results() -> None:
    found = {"results": {"t": {"alias": "t", "name": "t", "sample_len": 3, "acc,strict": 1}}}
    (score,) = scores_of(found)
    assert score == HarnessScore(
        task="t", metric="acc", filter="strict", value=1.0, error=None, shots=None, questions=None
    )


def test_tasks_that_cannot_run_are_one_message(
    folder: Path,
    tmp_path: Path,
    stub: Stub,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = refused(folder, "--lm-eval", "toy,none")
    assert "--lm-eval: there is no task none in lm-eval; name the folder of yours" in message
    assert "there is toy" in message
    assert stub.asked["manager"] == (None, True)
    assert "chat template" in refused(folder, "--lm-eval", "toy", "--form", "chat")
    message = refused(folder, "--lm-eval", "broken")
    assert "these tasks of lm-eval cannot be read" in message
    assert "'text'" in message
    gone = ["--lm-eval-tasks", tmp_path / "none"]
    assert "there is no folder" in refused(folder, "--lm-eval", "toy", *gone)
    message = refused(folder, tmp_path / "x.txt", *gone)
    assert "--lm-eval-tasks has no effect without --lm-eval" in message
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    message = refused(folder, "--lm-eval", "toy")
    assert "--lm-eval needs the package lm-eval, which cannot be imported" in message
    assert "pip install lm-eval" in message
