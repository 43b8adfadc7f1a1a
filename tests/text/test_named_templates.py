"""Named templates against strings written by hand from the models' public formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from ascend_run.text.encoder import Encoder
from ascend_run.text.labelling import Labelled
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.samples import Conversation
from ascend_run.text.template_records import NAMED
from ascend_run.text.templates import ChatTemplate, TemplateRefusal
from ascend_run.text.turns import render
from tests.support.chats import LONG, write_tokenizer

CHAT: Final = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "U2"},
    {"role": "assistant", "content": "A2"},
]

_IM = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n"
    "<|im_start|>assistant\nA1<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n"
    "<|im_start|>assistant\nA2<|im_end|>\n"
)
_DEEPSEEK = "<s>S\n\nUser: U1\n\nAssistant: A1</s>User: U2\n\nAssistant: A2</s>"
_MISTRAL = "<s>[INST] S\n\nU1 [/INST]A1</s>[INST] U2 [/INST]A2</s>"
REFERENCE: Final = (
    *("chatglm2", "chatglm3", "chatglm3_system", "glm4", "chatml", "chatml_de", "cpm", "default"),
    *("empty", "trl", "qwen", "qwen_r1", "qwen_math_r1", "llama3", "mistral", "mixtral", "gemma"),
    *("magistral", "llama2", "alpaca", "deepseek2", "deepseek2-lite", "minicpm3", "baichuan2"),
    *("deepseek3", "intern2", "hunyuan", "qwen3", "bailing_mini", "plm", "aquila"),
    *("glm4_moe", "qwen_lf", "gpt_oss"),
)
"""``--prompt-type`` of MindSpeed-LLM, configs/finetune/templates.json of its commit 501538c,
aquila, and the three that its later list has beside them."""
_GLM4 = "[gMASK]<sop><|system|>\nS<|user|>\nU1<|assistant|>\nA1<|user|>\nU2<|assistant|>\nA2"
_GLM3 = "<|system|>\n S<|user|>\n U1<|assistant|>\n A1<|user|>\n U2<|assistant|>\n A2"
_R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves "
    "it. The assistant first thinks about the reasoning process in the mind and then provides the "
    "user with the answer. The reasoning process and answer are enclosed within <think> </think> "
    "and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think>"
    "<answer> answer here </answer>Put your final answer within \\boxed{}. "
)
GOLDEN: Final = {
    "alpaca": (
        "<s>S\n\n### Instruction:\nU1\n\n### Response:\nA1</s>\n\n"
        "### Instruction:\nU2\n\n### Response:\nA2</s>\n\n"
    ),
    "aquila": "S###Human: U1###Assistant:A1###</s>Human: U2###Assistant:A2###</s>",
    "baichuan": ("S<reserved_102>U1<reserved_103>A1</s><reserved_102>U2<reserved_103>A2</s>"),
    "baichuan2": ("S<reserved_106>U1<reserved_107>A1</s><reserved_106>U2<reserved_107>A2</s>"),
    "bailing": (
        "<role>SYSTEM</role>S<role>HUMAN</role>U1<role>ASSISTANT</role>A1</s>"
        "<role>HUMAN</role>U2<role>ASSISTANT</role>A2</s>"
    ),
    "bailing_mini": (
        "<role>SYSTEM</role>S<|role_end|><role>HUMAN</role>U1<|role_end|>"
        "<role>ASSISTANT</role>A1<|role_end|><role>HUMAN</role>U2<|role_end|>"
        "<role>ASSISTANT</role>A2<|role_end|>"
    ),
    "chatglm2": (
        "[gMASK]sopS[Round 1]\n\n\u95ee\uff1aU1\n\n\u7b54\uff1aA1\n\n"
        "[Round 2]\n\n\u95ee\uff1aU2\n\n\u7b54\uff1aA2\n\n"
    ),
    "chatglm3": (
        "[gMASK]sop<|system|>\n S<|user|>\n U1<|assistant|>\n A1<|user|>\n U2<|assistant|>\n A2"
    ),
    "chatglm3_system": "[gMASK]sop" + _GLM3,
    "chatml": _IM,
    "chatml_de": _IM,
    "command-r": (
        "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>U1<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>A1<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>U2<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>A2<|END_OF_TURN_TOKEN|>"
    ),
    "cpm": "<s>S<用户>U1<AI>A1</s><用户>U2<AI>A2</s>",
    "deepseek": _DEEPSEEK,
    "deepseek2": _DEEPSEEK,
    "deepseek2-lite": _DEEPSEEK,
    "deepseek3": "<s>S<｜User｜>U1<｜Assistant｜>A1</s><｜User｜>U2<｜Assistant｜>A2</s>",  # noqa: RUF001
    "default": "S\nHuman: U1\nAssistant:A1</s>\nHuman: U2\nAssistant:A2</s>\n",
    "empty": "SU1A1</s>U2A2</s>",
    "exaone": (
        "[|system|]S[|endofturn|]\n[|user|]U1\n[|assistant|]A1[|endofturn|]\n"
        "[|user|]U2\n[|assistant|]A2[|endofturn|]\n"
    ),
    "gemma": (
        "<s><start_of_turn>user\nS\n\nU1<end_of_turn>\n<start_of_turn>model\nA1<end_of_turn>\n"
        "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\nA2<end_of_turn>\n"
    ),
    "glm4": _GLM4,
    "glm4_moe": _GLM4,
    "gpt_oss": (
        "<|start|>system<|message|>S<|end|><|start|>user<|message|>U1<|end|>"
        "<|start|>assistant<|channel|>final<|message|>A1<|end|><|start|>user<|message|>U2<|end|>"
        "<|start|>assistant<|channel|>final<|message|>A2<|end|>"
    ),
    "granite3": (
        "<|start_of_role|>system<|end_of_role|>S</s>\n<|start_of_role|>user<|end_of_role|>U1</s>\n"
        "<|start_of_role|>assistant<|end_of_role|>A1</s>\n"
        "<|start_of_role|>user<|end_of_role|>U2</s>\n"
        "<|start_of_role|>assistant<|end_of_role|>A2</s>\n"
    ),
    "hunyuan": "SU1A1</s>U2A2</s>",
    "intern2": "<s>" + _IM,
    "internlm": ("<s><|System|>:S\n<|User|>:U1\n<|Bot|>:A1<eoa>\n<|User|>:U2\n<|Bot|>:A2<eoa>\n"),
    "internlm2": "<s>" + _IM,
    "internlm3": "<s>" + _IM,
    "llama2": ("<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU1 [/INST] A1 </s><s>[INST] U2 [/INST] A2 </s>"),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nU1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA1<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nU2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA2<|eot_id|>"
    ),
    "llama4": (
        "<s><|header_start|>system<|header_end|>\n\nS<|eot|>"
        "<|header_start|>user<|header_end|>\n\nU1<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\nA1<|eot|>"
        "<|header_start|>user<|header_end|>\n\nU2<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\nA2<|eot|>"
    ),
    "magistral": ("<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U1[/INST]A1</s>[INST]U2[/INST]A2</s>"),
    "minicpm": "<s>S<用户>U1<AI>A1</s><用户>U2<AI>A2</s>",
    "minicpm3": "<s>" + _IM,
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL,
    "openchat": (
        "<s>SGPT4 Correct User: U1<|end_of_turn|>GPT4 Correct Assistant: A1<|end_of_turn|>"
        "GPT4 Correct User: U2<|end_of_turn|>GPT4 Correct Assistant: A2<|end_of_turn|>"
    ),
    "orion": ("<s>SHuman: U1\n\nAssistant: </s>A1</s>Human: U2\n\nAssistant: </s>A2</s>"),
    "phi3": (
        "<s><|system|>\nS<|end|>\n<|user|>\nU1<|end|>\n<|assistant|>\nA1<|end|>\n"
        "<|user|>\nU2<|end|>\n<|assistant|>\nA2<|end|>\n"
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>U1<|im_end|>"
        "<|im_start|>assistant<|im_sep|>A1<|im_end|><|im_start|>user<|im_sep|>U2<|im_end|>"
        "<|im_start|>assistant<|im_sep|>A2<|im_end|>"
    ),
    "plm": _IM,
    "qwen": _IM,
    "qwen-math": _IM,
    "qwen3": _IM,
    "qwen_lf": _IM,
    "qwen_math_r1": _IM,
    "qwen_r1": _IM.replace("user\n", f"user\n{_R1}"),
    "starchat": (
        "<|system|>\nS<|end|>\n<|user|>\nU1<|end|>\n<|assistant|>\nA1<|end|>\n"
        "<|user|>\nU2<|end|>\n<|assistant|>\nA2<|end|>\n"
    ),
    "trl": "<s>SU1A1</s>U2A2</s>",
    "tulu": (
        "<|system|>\nS\n<|user|>\nU1\n<|assistant|>\nA1</s>\n<|user|>\nU2\n<|assistant|>\nA2</s>\n"
    ),
    "vicuna": "<s>S USER: U1 ASSISTANT: A1</s>USER: U2 ASSISTANT: A2</s>",
    "yi": _IM,
    "zephyr": (
        "<|system|>\nS</s>\n<|user|>\nU1</s>\n<|assistant|>\nA1</s>\n"
        "<|user|>\nU2</s>\n<|assistant|>\nA2</s>\n"
    ),
}


def template(name: str) -> ChatTemplate:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source=NAMED[name].jinja(), name=name, variables=variables, date=None)


def test_every_template_has_a_golden_text() -> None:
    assert [*NAMED] == sorted(NAMED) == [*GOLDEN]


def test_every_template_of_the_reference_is_there_by_its_name() -> None:
    assert len({*REFERENCE}) == 34
    assert {*REFERENCE} - NAMED.keys() == set()


@pytest.mark.parametrize("name", NAMED)
def test_a_template_renders_its_public_format(name: str) -> None:
    assert template(name).render(CHAT) == GOLDEN[name]


@pytest.mark.parametrize("name", NAMED)
def test_turns_are_what_the_model_writes(name: str) -> None:
    """A turn begins after the prompt of generation, and ends with the next turn of the user."""
    rendered = render(template(name), Conversation(messages=tuple(CHAT)))
    record = NAMED[name]
    for (begin, end), answer, before in zip(rendered.spans, ("A1", "A2"), (2, 4), strict=True):
        prompt = template(name).render(CHAT[:before], prompt=True)
        assert rendered.text[:begin] == prompt
        wanted = record.assistant.replace("{eos}", "</s>").replace("{content}", answer)
        assert rendered.text[begin:end] == wanted


@pytest.mark.parametrize("name", NAMED)
def test_every_turn_is_trained_with_one_end(tmp_path: Path, name: str) -> None:
    tokenizer, chosen = open_chat(
        ChatOptions(
            tokenizer=write_tokenizer(tmp_path, None), template=name, tokenizer_option="t",
            template_option="t", date_option="t",
        )
    )  # fmt: skip
    encoder = Encoder(tokenizer=tokenizer, template=chosen, keeps_special=False)
    (labelled,) = encoder.label([Conversation(messages=tuple(LONG))])
    assert isinstance(labelled, Labelled)
    runs: list[list[int]] = [[]]
    for number, trained in zip(labelled.ids, labelled.trained, strict=True):
        if trained:
            runs[-1].append(number)
        elif runs[-1]:
            runs.append([])
    ends = {tokenizer.eos_id, tokenizer.backend.token_to_id("<|im_end|>")}
    assert len(runs) == 2
    for run, answer in zip(runs, ("three four, and then five", "six seven"), strict=True):
        assert [number in ends for number in run] == [False] * (len(run) - 1) + [True]
        assert answer in tokenizer.backend.decode(run)


def test_a_default_system_message_is_for_conversations_without_one() -> None:
    user = "<|im_start|>user\nU1<|im_end|>\n"
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert template("qwen").render(CHAT[1:2]) == system + user
    assert template("qwen3").render(CHAT[1:2]) == user
    named = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert template("qwen_lf").render(CHAT[1:2]) == f"<|im_start|>system\n{named}<|im_end|>\n{user}"
    system = "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI."
    assert template("gpt_oss").render(CHAT[1:2]).startswith(f"{system}<|end|><|start|>user")
    assert template("gemma").render(CHAT[1:2]).startswith("<s><start_of_turn>user\nU1<end_of")


TOOLS: Final = {
    "chatglm3": "[gMASK]sop<|observation|>\n T",
    "glm4": "[gMASK]<sop><|observation|>\nT",
    "llama3": "<s><|start_header_id|>ipython<|end_header_id|>\n\nT<|eot_id|>",
    "qwen3": "<|im_start|>user\n<tool_response>\nT\n</tool_response><|im_end|>\n",
}


def test_results_of_tools_are_rendered_or_refused() -> None:
    result = [{"role": "tool", "content": "T"}]
    for name, text in TOOLS.items():
        assert template(name).render(result) == text
    with pytest.raises(TemplateRefusal, match="cannot render the result of a tool"):
        template("phi3").render(result)
    with pytest.raises(TemplateRefusal, match="cannot render tools"):
        template("chatml").render(CHAT, tools=[{"name": "add"}])
    with pytest.raises(TemplateRefusal, match="cannot render documents"):
        template("chatml").render(CHAT, documents=[{"text": "D"}])


@pytest.mark.parametrize("name", ["llama2", "gemma", "mistral"])
def test_a_system_message_without_a_user_is_not_lost(name: str) -> None:
    wrong: list[dict[str, Any]] = [CHAT[0], CHAT[2]]
    with pytest.raises(TemplateRefusal, match="must be followed by the user"):
        template(name).render(wrong)
    with pytest.raises(TemplateRefusal, match="must be followed by the user"):
        template(name).render([*CHAT[1:3], CHAT[0], *CHAT[3:]])
