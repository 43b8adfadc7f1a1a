"""A stored model as a model of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ascend_run.tools.convert.source_options import SourceOptions
from ascend_run.tools.evaluate.stored_model import chat_template
from ascend_run.tools.generate.answering import DTYPES, model_texts
from ascend_run.tools.generate.model import loaded_model

from .requests import HarnessModel


@contextmanager
def open_lm(
    path: Path | str,
    *,
    tokenizer: Path | str | None = None,
    dtype: str | None = None,
    chat: bool = False,
    options: SourceOptions | None = None,
) -> Iterator[Any]:
    """Yield an ``lm_eval.api.model.LM``, for ``lm_eval.simple_evaluate(model=...)``.

    Args:
        path: Any folder that ``ascend-run generate`` reads.
        dtype: fp32, bf16 or fp64; None: as ``ascend-run generate``.
        chat: Whether ``simple_evaluate`` may apply the chat template beside the tokenizer.

    Raises:
        AscendRunError: The model or its tokenizer cannot be read.
    """
    options = options or SourceOptions()
    named = None if tokenizer is None else Path(tokenizer)
    texts = model_texts(Path(path), options, named)
    template = chat_template(texts.path) if chat else None
    with loaded_model(Path(path), options, None if dtype is None else DTYPES[dtype]) as model:
        yield lm_of(HarnessModel.of(model, texts, template))


def lm_of(harness: HarnessModel) -> Any:
    """Return a model as lm-evaluation-harness takes it.

    How contexts and continuations are encoded is its own ``TemplateLM``.
    """
    from lm_eval.api.model import TemplateLM

    class StoredLM(_Answers, TemplateLM):  # type: ignore[misc]
        """Answers by a stored model."""

    lm = StoredLM()
    lm.harness = harness
    return lm


class _Answers:
    """What ``TemplateLM`` leaves open."""

    harness: HarnessModel
    cache_hook: Any

    @property
    def eot_token_id(self) -> int:
        return self.harness.end_id

    @property
    def prefix_token_id(self) -> int:
        return self.harness.prefix_id

    @property
    def max_length(self) -> int:
        return self.harness.model.max_length

    @property
    def tokenizer_name(self) -> str:
        return str(self.harness.texts.path)

    def apply_chat_template(
        self, chat_history: Sequence[Any], add_generation_prompt: bool = True
    ) -> str:
        return self.harness.chat(chat_history, prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return "" if self.harness.template is None else self.harness.template.source

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        return self.harness.encode(string, special=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], **options: Any
    ) -> list[tuple[float, bool]]:
        found = self.harness.log_likelihoods([(request[1], request[2]) for request in requests])
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], result)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        texts = [request.args[0] for request in requests]
        found = self.harness.rolling_log_likelihoods(texts)
        for text, result in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), result)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found = self.harness.answers([request.args for request in requests])
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, result)
        return found
