"""The model variants of MindSpeed-LLM 2502's tables of models, and the preset of each.

A variant that its table lists once more for another sequence length has the same preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NO_CONFIG: Final = "its config.json was not published"

VARIANTS: Final[Mapping[str, Mapping[str, str]]] = {
    "Aquila": {"7B": "aquila-7b"},
    "Aquila2": {"7B": "aquila2-7b", "34B": "aquila2-34b"},
    "Baichuan": {"7B": "baichuan-7b", "13B": "baichuan-13b"},
    "Baichuan2": {"7B": "baichuan2-7b", "13B": "baichuan2-13b"},
    "Bloom": {"7B1": "bloom-7b1", "176B": "bloom-176b"},
    "ChatGLM3": {"6B": "chatglm3-6b"},
    "GLM4": {"9B": "glm-4-9b"},
    "CodeLlama": {"34B": "codellama-34b"},
    "InternLM": {"7B": "internlm-7b", "65B": NO_CONFIG},
    "InternLM2": {"7B": "internlm2-7b", "20B": "internlm2-20b"},
    "InternLM2.5": {
        "1.8B": "internlm2.5-1.8b",
        "7B": "internlm2.5-7b",
        "20B": "internlm2.5-20b",
    },
    "InternLM3": {"8B": "internlm3-8b"},
    "LLaMA": {"7B": "llama-7b", "13B": "llama-13b", "33B": "llama-33b", "65B": "llama-65b"},
    "LLaMA2": {
        "7B": "llama-2-7b",
        "13B": "llama-2-13b",
        "34B": "llama-2-34b",
        "70B": "llama-2-70b",
    },
    "LLaMA3": {"8B": "llama-3-8b", "70B": "llama-3-70b"},
    "LLaMA3.1": {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b", "405B": "llama-3.1-405b"},
    "LLaMA3.2": {"1B": "llama-3.2-1b", "3B": "llama-3.2-3b"},
    "LLaMA3.3": {"70B": "llama-3.3-70b"},
    "Qwen": {"7B": "qwen-7b", "14B": "qwen-14b", "72B": "qwen-72b"},
    "Qwen1.5": {
        size: f"qwen1.5-{size.lower()}"
        for size in ("0.5B", "1.8B", "4B", "7B", "14B", "32B", "72B", "110B")
    },
    "CodeQwen1.5": {"7B": "codeqwen1.5-7b"},
    "Qwen2": {
        "0.5B, 4K": "qwen2-0.5b",
        "0.5B, 32K": "qwen2-0.5b",
        "1.5B, 4K": "qwen2-1.5b",
        "1.5B, 32K": "qwen2-1.5b",
        "7B, 4K": "qwen2-7b",
        "7B, 32K": "qwen2-7b",
        "72B": "qwen2-72b",
    },
    "Qwen2.5": {
        size: f"qwen2.5-{size.lower()}"
        for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
    },
    "Qwen2.5-Math": {
        "1.5B": "qwen2.5-math-1.5b",
        "7B": "qwen2.5-math-7b",
        "72B": "qwen2.5-math-72b",
    },
    "Qwen2.5-Coder": {"7B": "qwen2.5-coder-7b"},
    "Yi": {"6B": "yi-6b", "34B": "yi-34b"},
    "Yi1.5": {"6B": "yi-1.5-6b", "9B": "yi-1.5-9b", "34B": "yi-1.5-34b"},
    "Mistral": {"7B": "mistral-7b"},
    "Gemma": {"2B": "gemma-2b", "7B": "gemma-7b"},
    "Gemma2": {"9B": "gemma2-9b", "27B": "gemma2-27b"},
    "GPT3": {"175B": "gpt3-175b"},
    "GPT4": {"16x": NO_CONFIG},
    "MiniCPM": {"2B": "minicpm-2b"},
    "MiniCPM3": {"4B": "minicpm3-4b"},
    "Phi3.5": {"mini": "phi-3.5-mini"},
    "DeepSeek-Math": {"7B": "deepseek-math-7b"},
    "DeepSeek-R1-Distill-Qwen": {
        size: f"r1-distill-qwen-{size.lower()}" for size in ("1.5B", "7B", "14B", "32B")
    },
    "DeepSeek-R1-Distill-LLaMA": {"8B": "r1-distill-llama-8b", "70B": "r1-distill-llama-70b"},
    "Qwen2-MoE": {"57B-A14B": "qwen2-57b-a14b"},
    "Mixtral": {"8x7B": "mixtral-8x7b", "8x22B": "mixtral-8x22b"},
    "DeepSeek-V2": {"236B": "deepseek-v2-236b"},
    "DeepSeek-V2-Coder": {"236B": "deepseek-coder-v2-236b"},
    "DeepSeek-V2-Lite": {"16B": "deepseek-v2-lite"},
    "DeepSeek-V2.5": {"236B": "deepseek-v2.5-236b"},
    "DeepSeek-V3": {"671B": "deepseek-v3-671b"},
    "MiniCPM-MoE": {"8x2B": "minicpm-moe-8x2b"},
    "Phi3.5-MoE": {"16x3.8B": "phi-3.5-moe"},
    "Grok1": {"8x40B": "grok-1"},
}
"""Model -> variant -> preset, or the reason why there is none."""
