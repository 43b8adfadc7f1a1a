"""Ask a model that transformers loads twenty questions, and compare its answers.

python examples/qwen_ask.py FOLDER ; exit code 1 if fewer than 18 are right. Needs transformers.
"""

from __future__ import annotations

import sys

from qwen_data import WORDS
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = [
    (f"What comes {where} {word}?", f"{WORDS[(place + step) % 10]}.")
    for where, step in (("after", 1), ("before", -1))
    for place, word in enumerate(WORDS)
]


def main(folder: str) -> int:
    """Print each answer, and return the exit code."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    right = 0
    for question, expected in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        right += answer.strip() == expected
        print(f"{question:32} {answer.strip()}")
    print(f"{right} of {len(QUESTIONS)} right")
    return 0 if right >= 18 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
