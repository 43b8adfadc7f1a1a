"""Made-up questions about numbers: text to train a base on, conversations to tune it with.

python examples/sft_data.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ 'A: ' + message.content + eos_token }}"
    "{% else %}{{ 'Q: ' + message.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)


def exchange(chance: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    numbers = [chance.randrange(10) for _ in range(chance.randint(2, 4))]
    said = [WORDS[number] for number in numbers]
    asked = chance.choice(("Which is the largest of", "Say backwards:"))
    if asked.startswith("Say"):
        return f"{asked} {' '.join(said)}.", " ".join(reversed(said))
    return f"{asked} {', '.join(said)}?", WORDS[max(numbers)]


def main(folder: Path) -> None:
    """Write ``corpus.jsonl``, ``train.jsonl``, ``heldout.jsonl`` and ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    texts = [" ".join(exchange(chance)) for _ in range(4000)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    for name, count in (("train", 1000), ("heldout", 64)):
        records = []
        for _ in range(count):
            question, answer = exchange(chance)
            records.append(json.dumps({"instruction": question, "input": "", "output": answer}))
        (folder / f"{name}.jsonl").write_text("\n".join(records) + "\n")
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
