"""Answer the requests of lm-evaluation-harness as its own class for Hugging Face models does.

Source: HFLM in lm_eval/models/huggingface.py, TemplateLM in lm_eval/api/model.py and
get_rolling_token_windows in lm_eval/utils.py of lm-eval 0.4.13. Does not import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.ops.generation.engine import Engine, Request
from ascend_run.ops.generation.sampling import Sampling, sampling_problems
from ascend_run.plugin_api import ConfigError
from ascend_run.text.chat_tokenizer import read_tokenizer_config, tokenizer_folder
from ascend_run.text.templates import ChatTemplate, TemplateRefusal
from ascend_run.tools.evaluate.row_scores import Row, row_scores
from ascend_run.tools.generate.model import GenerationModel
from ascend_run.tools.generate.texts import Texts

_ROWS: Final = 256
"""Whose ids are held at a time."""
_MAX_SEQUENCES: Final = 16
_PAGE: Final = 16
_HERE: Final = "<|continue-here|> "
"""Marks the end of a message that is to be continued. Its last space shows whether the template
strips contents."""
_MOST_NEW: Final = 256
"""Tokens of an answer where a task does not say it."""
_LENGTHS: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of that number, the first that is there counts."""
_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@attrs.frozen(kw_only=True, eq=False)
class HarnessModel:
    """A stored model with its tokenizer."""

    model: GenerationModel
    texts: Texts
    begin_id: int | None  #: Of the special token that begins a text.
    end_id: int  #: Of the one that ends a text.
    template: ChatTemplate | None = None  #: Of messages of a chat.

    @classmethod
    def of(
        cls, model: GenerationModel, texts: Texts, template: ChatTemplate | None = None
    ) -> HarnessModel:
        """Look up the special tokens of a tokenizer.

        Raises:
            ConfigError: None of them ends a text.
        """
        try:
            config = read_tokenizer_config(tokenizer_folder(texts.path))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        begin, end = (_special_id(texts, config, name) for name in ("bos_token", "eos_token"))
        end = texts.tokenizer.eod if end is None else end
        if end is None:
            raise ConfigError(
                f"{texts.path}: the tokenizer names no token that ends a text, which lm-eval "
                "needs; name it as eos_token in tokenizer_config.json beside it"
            )
        return cls(model=model, texts=texts, begin_id=begin, end_id=end, template=template)

    @property
    def prefix_id(self) -> int:
        """What a text without a context follows."""
        return self.end_id if self.begin_id is None else self.begin_id

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        """Return the ids of a text.

        Args:
            special: Whether the tokenizer adds its special tokens; None: unless the text spells
                the one that begins it.
        """
        if special is None:
            begin = self.texts.token(self.prefix_id)
            special = not (begin and text.startswith(begin))
        return list(self.texts.tokenizer.backend.encode(text, add_special_tokens=special).ids)

    def chat(self, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
        """Return messages as a text: up to where the assistant begins, or in the last of them.

        A template that refuses them gets them without those of the system, as in HFLM.

        Raises:
            ConfigError: There is no template, or it refuses the messages.
        """
        if self.template is None:
            raise ConfigError("this model of lm-eval has no chat template; say --form chat")
        sent = [dict(message) for message in messages]
        if not prompt:
            sent[-1]["content"] += _HERE
        try:
            text = self.template.render(sent, prompt=prompt)
        except TemplateRefusal:
            try:
                others = [message for message in sent if message["role"] != "system"]
                text = self.template.render(others, prompt=prompt)
            except TemplateRefusal as error:
                raise ConfigError(f"the chat template refuses the messages: {error}") from None
        if prompt:
            return text
        end = text.rindex(_HERE.strip())
        return text[:end] if text.startswith(_HERE, end) else text[:end].rstrip()

    def log_likelihoods(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) the log-probability of the continuation, and
        whether greedy decoding would give it. A context that is too long loses its begin.

        Raises:
            ConfigError: A continuation is empty, or longer than the model's longest text; or an id
                is beyond its vocabulary.
        """
        longest = self.model.max_length
        rows = []
        for context, continuation in pairs:
            if not context or not 0 < len(continuation) <= longest:
                raise ConfigError(
                    f"lm-eval asks for {len(continuation)} tokens after {len(context)}; expected "
                    f"1 to {longest} after at least one"
                )
            ids = [*context, *continuation][-(longest + 1) :]
            rows.append(Row(ids=ids, num_scored=len(continuation)))
        return [*self._scored(rows)]

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Return the log-probability of each text: each token is scored once, in windows of the
        model's longest text of which the last reaches back over what is scored already."""
        found = []
        for text in texts:
            rows = [*rolling_rows(self.encode(text), self.prefix_id, self.model.max_length)]
            found.append(sum(score for score, _ in self._scored(rows)))
        return found

    def answers(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return what follows each context, up to its stop words.

        Raises:
            ConfigError: Its settings are unknown or out of range, or leave no room for the context.
        """
        asked = [self._asked(*request, index) for index, request in enumerate(requests)]
        sizes = sorted((-(-one.num_stored // _PAGE) * _PAGE for one, _ in asked), reverse=True)
        engine = self.model.engine(sum(sizes[:_MAX_SEQUENCES]), max_sequences=_MAX_SEQUENCES)
        numbers = [engine.submit(request) for request, _ in asked]
        stops = {number: stop for number, (_, stop) in zip(numbers, asked, strict=True)}
        found = self._generated(engine, stops)
        return [found[number] for number in numbers]

    def _generated(self, engine: Engine, stops: Mapping[int, Sequence[str]]) -> dict[int, str]:
        """Return the text of each sequence, before its first stop word."""
        ids: dict[int, list[int]] = {number: [] for number in stops}
        found: dict[int, str] = {}
        while not engine.is_idle:
            for emitted in engine.step():
                number = emitted.sequence
                ids[number].append(emitted.token)
                text = self.texts.tokenizer.backend.decode(ids[number], skip_special_tokens=True)
                stopped = any(word in text for word in stops[number])
                if stopped and emitted.finish is None:
                    engine.cancel(number)
                if stopped or emitted.finish is not None:
                    for word in stops[number]:
                        text = text.split(word)[0]
                    found[number] = text
        return found

    def _asked(
        self, context: str, settings: Mapping[str, Any], index: int
    ) -> tuple[Request, list[str]]:
        given = {name: value for name, value in settings.items() if value is not None}
        until = given.pop("until", [])
        stop = [until] if isinstance(until, str) else [*until]
        stop = [word for word in (*stop, self.texts.token(self.end_id)) if word]
        lengths = [given.pop(name) for name in _LENGTHS if name in given]
        most = int(lengths[0]) if lengths else _MOST_NEW
        sampling = _sampling(given, index)
        if most >= self.model.max_length or most < 1:
            raise ConfigError(
                f"lm-eval asks for {most} new tokens; expected 1 to {self.model.max_length - 1}, "
                "since the model's longest text has one more (max_gen_toks of the task)"
            )
        ids = self.encode(context)[-(self.model.max_length - most) :] or [self.prefix_id]
        self._require_known(ids)
        ends = self.texts.end_ids | {self.end_id}
        request = Request(prompt=tuple(ids), max_new_tokens=most, end_ids=ends, sampling=sampling)
        return request, stop

    def _scored(self, rows: Sequence[Row]) -> Iterator[tuple[float, bool]]:
        for begin in range(0, len(rows), _ROWS):
            some = rows[begin : begin + _ROWS]
            self._require_known([token for row in some for token in row.ids])
            for scores in row_scores(self.model, some):
                yield float(scores.log_probabilities.sum()), scores.greedy

    def _require_known(self, ids: Sequence[int]) -> None:
        vocab_size = self.model.config.model.vocab_size
        if max(ids) >= vocab_size:
            raise ConfigError(
                f"a text has the token id {max(ids)}, and the model's vocabulary has {vocab_size} "
                "ids; name the model's own tokenizer with --tokenizer"
            )


def _special_id(texts: Texts, config: Mapping[str, Any], name: str) -> int | None:
    stated = config.get(name)
    text = stated.get("content") if isinstance(stated, Mapping) else stated
    if not isinstance(text, str):
        return None
    number: int | None = texts.tokenizer.backend.token_to_id(text)
    return number


def _sampling(given: dict[str, Any], index: int) -> Sampling:
    """
    Raises:
        ConfigError: Settings of the generation are unknown, or out of range; lists all.
    """
    draws = given.pop("do_sample", None)
    values: dict[str, Any] = {name: given.pop(name) for name in _SAMPLING if name in given}
    problems = [
        f"{name} {values[name]}: {expected}" for name, expected in sampling_problems(values).items()
    ]
    known = ", ".join(("until", "do_sample", *_LENGTHS, *_SAMPLING))
    problems += [f"{name}: expected one of {known}" for name in given]
    if problems:
        raise ConfigError("these generation_kwargs of lm-eval cannot be used", problems)
    if draws is False or (draws is None and not values.get("temperature")):
        values = {name: value for name, value in values.items() if name == "repetition_penalty"}
        return Sampling(**values)
    return Sampling(**{"temperature": 1.0, **values}).of_prompt(index)


def rolling_rows(ids: Sequence[int], prefix_id: int, longest: int) -> Iterator[Row]:
    """Yield rows of at most ``longest`` inputs that score each id once.

    The first begins with the prefix; each other one has as much context as fits.
    """
    count = min(longest, len(ids))
    if count:
        yield Row(ids=[prefix_id, *ids[:count]], num_scored=count)
    scored = count
    while scored < len(ids):
        count = min(longest, len(ids) - scored)
        end = scored + count
        yield Row(ids=ids[end - longest - 1 : end], num_scored=count)
        scored = end
