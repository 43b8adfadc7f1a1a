"""Prompts as options, read and checked before anything starts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from ascend_run.ops.generation.text_lengths import TextLengths
from ascend_run.plugin_api import AscendRunError, RunConfig

if TYPE_CHECKING:
    from ascend_run.text.tokenizer import TextTokenizer

_OPTION: Final = "plugins.eval-generate"


@attrs.frozen(kw_only=True)
class PromptOptions:
    """What is continued: texts, lines of a file, and token ids, in this order."""

    prompts: tuple[str, ...] = ()
    """Texts to continue, as the run's tokenizer (``data.tokenizer``) encodes them."""
    prompts_file: str | None = None
    """File with a text to continue on each line."""
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids to continue, where there is no tokenizer."""


@attrs.frozen(kw_only=True)
class Prompt:
    """One text to continue."""

    title: str  #: In the report.
    ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Prompts:
    """What was read."""

    prompts: tuple[Prompt, ...]
    tokenizer: TextTokenizer | None
    problems: tuple[str, ...]
    """What is wrong with them; without any, they can be continued."""


def read_prompts(options: PromptOptions, config: RunConfig) -> Prompts:
    """Read and encode all prompts."""
    problems: list[str] = []
    texts = [*options.prompts, *_lines(options, problems)]
    if not (texts or options.prompt_ids or problems):
        problems.append(
            f"there is no prompt to continue; give texts with {_OPTION}.prompts or prompts_file, "
            f"or token ids with {_OPTION}.prompt_ids"
        )
    tokenizer = _tokenizer(config, bool(texts), problems)
    prompts = []
    if tokenizer is not None:
        encode = tokenizer.backend.encode
        for text in texts:
            ids = tuple(encode(text, add_special_tokens=True).ids)
            prompts.append(Prompt(title=text, ids=ids))
    for ids in options.prompt_ids:
        prompts.append(Prompt(title=f"ids {' '.join(map(str, ids))}", ids=ids))
    problems += _unanswerable(prompts, config)
    return Prompts(prompts=tuple(prompts), tokenizer=tokenizer, problems=tuple(problems))


def _lines(options: PromptOptions, problems: list[str]) -> list[str]:
    if options.prompts_file is None:
        return []
    option = f"{_OPTION}.prompts_file={options.prompts_file}"
    try:
        lines = Path(options.prompts_file).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        problems.append(f"{option} cannot be read: {reason}; name a file with a text on each line")
        return []
    if not lines:
        problems.append(f"{option} has no line; write a text to continue on each line")
    return lines


def _tokenizer(config: RunConfig, is_needed: bool, problems: list[str]) -> TextTokenizer | None:
    """Return the run's tokenizer, which also says how ids are shown; None without one."""
    if config.data.tokenizer is None:
        if is_needed:
            problems.append(
                "there are texts to continue and no data.tokenizer to encode them; set it to the "
                f"tokenizer of the training data, or give token ids with {_OPTION}.prompt_ids"
            )
        return None
    from ascend_run.text.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except AscendRunError as error:
        problems += error.problems or (error.headline,)
        return None
    # A prompt may spell special tokens, unlike a document to train on.
    tokenizer.backend.encode_special_tokens = False
    return tokenizer


def _unanswerable(prompts: Sequence[Prompt], config: RunConfig) -> Iterator[str]:
    longest, vocab_size = TextLengths.of_model(config).longest, config.model.vocab_size
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.ids:
            yield f"prompt {number} is empty, and the tokenizer adds no token that begins a text"
            continue
        if len(prompt.ids) >= longest:
            yield (
                f"prompt {number} has {len(prompt.ids)} tokens, and the model's longest text has "
                f"{longest}, with at least one new one; shorten it"
            )
        wrong = [number for number in prompt.ids if not 0 <= number < vocab_size]
        if wrong:
            yield (
                f"prompt {number} has the token id {wrong[0]}, and the model's vocabulary has "
                f"{vocab_size} ids, from 0; use the model's own tokenizer"
            )
