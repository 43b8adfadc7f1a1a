"""Further named templates, by the names that MindSpeed-LLM's ``--prompt-type`` has for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from .named_templates import NamedTemplate

_R1: Final = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves "
    "it. The assistant first thinks about the reasoning process in the mind and then provides the "
    "user with the answer. The reasoning process and answer are enclosed within <think> </think> "
    "and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think>"
    "<answer> answer here </answer>Put your final answer within \\boxed{}. "
)
"""The prompt of DeepSeek-R1-Zero, arXiv:2501.12948, table 1."""
_HELPFUL: Final = "You are a helpful assistant."


_OF_THEIR_OWN: Final = (
    NamedTemplate(
        name="aquila",
        prefix="",
        system="{content}###",
        user="Human: {content}###",
        prompt="Assistant:",
        assistant="{content}###{eos}",
        default_system=(
            "A chat between a curious human and an artificial intelligence assistant. The "
            "assistant gives helpful, detailed, and polite answers to the human's questions."
        ),
    ),
    NamedTemplate(
        name="bailing_mini",
        prefix="",
        system="<role>SYSTEM</role>{content}<|role_end|>",
        user="<role>HUMAN</role>{content}<|role_end|>",
        tool="<role>OBSERVATION</role>\n<tool_response>\n{content}\n</tool_response><|role_end|>",
        prompt="<role>ASSISTANT</role>",
        assistant="{content}<|role_end|>",
    ),
    NamedTemplate(
        name="chatglm2",
        prefix="[gMASK]sop",
        user="[Round {round}]\n\n\u95ee\uff1a{content}\n\n\u7b54\uff1a",
        assistant="{content}\n\n",
    ),
    NamedTemplate(
        name="default",
        prefix="",
        system="{content}\n",
        user="Human: {content}\n",
        prompt="Assistant:",
        assistant="{content}{eos}\n",
    ),
    NamedTemplate(  # answers are in the channel "final" of the harmony format
        name="gpt_oss",
        prefix="",
        system="<|start|>system<|message|>{content}<|end|>",
        user="<|start|>user<|message|>{content}<|end|>",
        prompt="<|start|>assistant<|channel|>final<|message|>",
        assistant="{content}<|end|>",
        default_system="You are ChatGPT, a large language model trained by OpenAI.",
    ),
    NamedTemplate(
        name="magistral",
        system="[SYSTEM_PROMPT]{content}[/SYSTEM_PROMPT]",
        user="[INST]{content}[/INST]",
    ),
)


def reference_templates(own: Mapping[str, NamedTemplate]) -> Iterator[NamedTemplate]:
    """Yield the templates; most are others under another name or with a system message.

    Args:
        own: The templates by the names of their models.
    """

    def like(name: str, new_name: str, default_system: str = "") -> NamedTemplate:
        return attrs.evolve(own[name], name=new_name, default_system=default_system)

    yield from _OF_THEIR_OWN
    yield like(
        "chatglm3",
        "chatglm3_system",
        "You are ChatGLM3, a large language model trained by Zhipu.AI. Follow the user's "
        "instructions carefully. Respond using markdown.",
    )
    yield like("chatml", "chatml_de", "Du bist ein freundlicher und hilfsbereiter KI-Assistent.")
    yield like("minicpm", "cpm")
    yield like("deepseek2", "deepseek2-lite")
    yield like("glm4", "glm4_moe")
    yield like("empty", "hunyuan", _HELPFUL)
    yield like("internlm2", "intern2")
    yield attrs.evolve(own["yi"], name="plm", default_system=_HELPFUL)
    yield like("qwen", "qwen_lf", f"You are Qwen, created by Alibaba Cloud. {_HELPFUL}")
    yield like("qwen-math", "qwen_math_r1", own["qwen-math"].default_system)
    yield attrs.evolve(
        own["qwen"], name="qwen_r1", user=f"<|im_start|>user\n{_R1}{{content}}<|im_end|>\n"
    )
    yield attrs.evolve(own["empty"], name="trl", prefix="{bos}")
