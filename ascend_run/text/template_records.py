"""The named chat templates, each after the public format of its models.

The tokenizer's own template is better where there is one: it also renders tools and reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from .named_templates import NamedTemplate
from .reference_templates import reference_templates


def _tagged(tag: str) -> str:
    return f"<|im_start|>{tag}\n{{content}}<|im_end|>\n"


_CHATML: Final = NamedTemplate(
    name="chatml",
    prefix="",
    system=_tagged("system"),
    user=_tagged("user"),
    tool=_tagged("tool"),
    prompt="<|im_start|>assistant\n",
    assistant="{content}<|im_end|>\n",
)
_QWEN_TOOL: Final = "<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
_DEEPSEEK: Final = NamedTemplate(
    name="deepseek",
    system="{content}\n\n",
    user="User: {content}\n\n",
    prompt="Assistant:",
    assistant=" {content}{eos}",
)
_MISTRAL: Final = NamedTemplate(
    name="mistral",
    system="{content}\n\n",
    system_in_user=True,
    user="[INST] {content} [/INST]",
)
_BAICHUAN: Final = NamedTemplate(
    name="baichuan", prefix="", user="<reserved_102>{content}", prompt="<reserved_103>"
)

_RECORDS: Final = (
    NamedTemplate(
        name="alpaca",
        system="{content}\n\n",
        user="### Instruction:\n{content}\n\n",
        tool="### Instruction:\n{content}\n\n",
        prompt="### Response:\n",
        assistant="{content}{eos}\n\n",
    ),
    _BAICHUAN,
    attrs.evolve(
        _BAICHUAN, name="baichuan2", user="<reserved_106>{content}", prompt="<reserved_107>"
    ),
    NamedTemplate(
        name="bailing",
        prefix="",
        system="<role>SYSTEM</role>{content}",
        user="<role>HUMAN</role>{content}",
        tool="<role>OBSERVATION</role>{content}",
        prompt="<role>ASSISTANT</role>",
    ),
    NamedTemplate(
        name="chatglm3",
        prefix="[gMASK]sop",
        system="<|system|>\n {content}",
        user="<|user|>\n {content}",
        tool="<|observation|>\n {content}",
        prompt="<|assistant|>",
        assistant="\n {content}",
    ),
    _CHATML,
    NamedTemplate(
        name="command-r",
        system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{content}<|END_OF_TURN_TOKEN|>",
        user="<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{content}<|END_OF_TURN_TOKEN|>",
        prompt="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        assistant="{content}<|END_OF_TURN_TOKEN|>",
    ),
    _DEEPSEEK,
    attrs.evolve(_DEEPSEEK, name="deepseek2"),
    NamedTemplate(
        name="deepseek3",
        user="<\uff5cUser\uff5c>{content}",
        prompt="<\uff5cAssistant\uff5c>",
    ),
    NamedTemplate(name="empty", prefix="", user="{content}", tool="{content}"),
    NamedTemplate(
        name="exaone",
        prefix="",
        system="[|system|]{content}[|endofturn|]\n",
        user="[|user|]{content}\n",
        prompt="[|assistant|]",
        assistant="{content}[|endofturn|]\n",
    ),
    NamedTemplate(
        name="gemma",
        system="{content}\n\n",
        system_in_user=True,
        user="<start_of_turn>user\n{content}<end_of_turn>\n",
        prompt="<start_of_turn>model\n",
        assistant="{content}<end_of_turn>\n",
    ),
    NamedTemplate(
        name="glm4",
        prefix="[gMASK]<sop>",
        system="<|system|>\n{content}",
        user="<|user|>\n{content}",
        tool="<|observation|>\n{content}",
        prompt="<|assistant|>",
        assistant="\n{content}",
    ),
    NamedTemplate(
        name="granite3",
        prefix="",
        system="<|start_of_role|>system<|end_of_role|>{content}{eos}\n",
        user="<|start_of_role|>user<|end_of_role|>{content}{eos}\n",
        prompt="<|start_of_role|>assistant<|end_of_role|>",
        assistant="{content}{eos}\n",
    ),
    NamedTemplate(
        name="internlm",
        system="<|System|>:{content}\n",
        user="<|User|>:{content}\n",
        prompt="<|Bot|>:",
        assistant="{content}<eoa>\n",
    ),
    attrs.evolve(_CHATML, name="internlm2", prefix="{bos}", tool=None),
    attrs.evolve(_CHATML, name="internlm3", prefix="{bos}", tool=None),
    NamedTemplate(
        name="llama2",
        prefix="",
        system="<<SYS>>\n{content}\n<</SYS>>\n\n",
        system_in_user=True,
        user="{bos}[INST] {content} [/INST]",
        assistant=" {content} {eos}",
    ),
    NamedTemplate(
        name="llama3",
        system="<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
        user="<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>",
        tool="<|start_header_id|>ipython<|end_header_id|>\n\n{content}<|eot_id|>",
        prompt="<|start_header_id|>assistant<|end_header_id|>\n\n",
        assistant="{content}<|eot_id|>",
    ),
    NamedTemplate(
        name="llama4",
        system="<|header_start|>system<|header_end|>\n\n{content}<|eot|>",
        user="<|header_start|>user<|header_end|>\n\n{content}<|eot|>",
        tool="<|header_start|>ipython<|header_end|>\n\n{content}<|eot|>",
        prompt="<|header_start|>assistant<|header_end|>\n\n",
        assistant="{content}<|eot|>",
    ),
    NamedTemplate(
        name="minicpm",
        user="<\u7528\u6237>{content}",
        prompt="<AI>",
    ),
    attrs.evolve(_CHATML, name="minicpm3", prefix="{bos}", tool=None),
    _MISTRAL,
    attrs.evolve(_MISTRAL, name="mixtral"),
    NamedTemplate(
        name="openchat",
        user="GPT4 Correct User: {content}<|end_of_turn|>",
        prompt="GPT4 Correct Assistant:",
        assistant=" {content}<|end_of_turn|>",
    ),
    NamedTemplate(
        name="orion",
        user="Human: {content}\n\n",
        prompt="Assistant: {eos}",
    ),
    NamedTemplate(
        name="phi3",
        system="<|system|>\n{content}<|end|>\n",
        user="<|user|>\n{content}<|end|>\n",
        prompt="<|assistant|>\n",
        assistant="{content}<|end|>\n",
    ),
    NamedTemplate(
        name="phi4",
        prefix="",
        system="<|im_start|>system<|im_sep|>{content}<|im_end|>",
        user="<|im_start|>user<|im_sep|>{content}<|im_end|>",
        prompt="<|im_start|>assistant<|im_sep|>",
        assistant="{content}<|im_end|>",
    ),
    attrs.evolve(
        _CHATML, name="qwen", default_system="You are a helpful assistant.", tool=_QWEN_TOOL
    ),
    attrs.evolve(
        _CHATML,
        name="qwen-math",
        default_system="Please reason step by step, and put your final answer within \\boxed{}.",
        tool=_QWEN_TOOL,
    ),
    attrs.evolve(_CHATML, name="qwen3", tool=_QWEN_TOOL),
    NamedTemplate(
        name="starchat",
        prefix="",
        system="<|system|>\n{content}<|end|>\n",
        user="<|user|>\n{content}<|end|>\n",
        prompt="<|assistant|>\n",
        assistant="{content}<|end|>\n",
    ),
    NamedTemplate(
        name="tulu",
        prefix="",
        system="<|system|>\n{content}\n",
        user="<|user|>\n{content}\n",
        prompt="<|assistant|>\n",
        assistant="{content}{eos}\n",
    ),
    NamedTemplate(
        name="vicuna",
        system="{content} ",
        user="USER: {content} ASSISTANT:",
        tool="USER: {content} ASSISTANT:",
        assistant=" {content}{eos}",
    ),
    attrs.evolve(_CHATML, name="yi", tool=None),
    NamedTemplate(
        name="zephyr",
        prefix="",
        system="<|system|>\n{content}{eos}\n",
        user="<|user|>\n{content}{eos}\n",
        prompt="<|assistant|>\n",
        assistant="{content}{eos}\n",
    ),
)
_OWN: Final = {record.name: record for record in _RECORDS}
_REFERENCE: Final = {record.name: record for record in reference_templates(_OWN)}
NAMED: Final[Mapping[str, NamedTemplate]] = dict(sorted((_OWN | _REFERENCE).items()))
"""Name -> template, in the order of the names."""
