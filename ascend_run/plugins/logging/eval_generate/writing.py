"""Write texts with the model of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from ascend_run.ops.generation.cached_attention import CachedForward
from ascend_run.ops.generation.engine import Emitted, Engine, Request, cache_tokens
from ascend_run.ops.generation.key_value_cache import KeyValueCache
from ascend_run.ops.generation.sampling import Sampling
from ascend_run.ops.generation.text_lengths import TextLengths
from ascend_run.plugin_api import ModelBundle, RunContext
from ascend_run.text.generated_text import GeneratedText

from .prompts import Prompt, read_prompts
from .sample_file import Text
from .trained_model import TrainedModel, evaluating

if TYPE_CHECKING:
    from . import EvalGenerateConfig

_MAX_SEQUENCES = 16
_CHUNK_TOKENS = 128
"""Of prompts in a step: the logits of all of them are computed."""


class Writer:
    """Continues the prompts of a run, on all of its ranks at the same time."""

    def __init__(
        self, options: EvalGenerateConfig, context: RunContext, forward: CachedForward
    ) -> None:
        found = read_prompts(options, context.config)
        self._prompts, self._tokenizer = found.prompts, found.tokenizer
        self._forward, self._lengths = forward, TextLengths.of_model(context.config)
        sampling = Sampling(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        )
        eod = None if self._tokenizer is None else self._tokenizer.eod
        self._requests = [
            Request(
                prompt=prompt.ids,
                max_new_tokens=min(options.max_new_tokens, self._lengths.longest - len(prompt.ids)),
                end_ids=frozenset() if eod is None else frozenset({eod}),
                sampling=sampling.of_prompt(index),
            )
            for index, prompt in enumerate(self._prompts)
        ]

    def texts(self, context: RunContext) -> list[Text]:
        """Continue all prompts with the task's first model as it is now; the same on all ranks."""
        bundle = next(bundle for bundle in context.models.values() if bundle.trains)
        emitted = self._emitted(context, bundle)
        texts = [self._text(*pair) for pair in zip(self._prompts, emitted, strict=True)]
        if context.layout.rank == 0:
            log = structlog.get_logger()
            for text in texts:
                log.info("eval_generate.text", step=context.step, prompt=text.title, text=text.text)
        return texts

    def _emitted(self, context: RunContext, bundle: ModelBundle) -> list[list[Emitted]]:
        model = TrainedModel(context, bundle, self._forward, self._lengths)
        cache = KeyValueCache(cache_tokens(self._requests, _MAX_SEQUENCES))
        engine = Engine(
            model.logits,
            cache,
            chunk_tokens=_CHUNK_TOKENS,
            max_sequences=_MAX_SEQUENCES,
            restarts_above=self._lengths.restarts_above,
        )
        found: dict[int, list[Emitted]] = {engine.submit(request): [] for request in self._requests}
        self._forward.cache = cache
        try:
            with evaluating(bundle):
                while not engine.is_idle:
                    for one in engine.step():
                        found[one.sequence].append(one)
        finally:
            self._forward.cache = None
        return [*found.values()]

    def _text(self, prompt: Prompt, emitted: Sequence[Emitted]) -> Text:
        ids = tuple(one.token for one in emitted)
        finish = emitted[-1].finish
        assert finish is not None
        if self._tokenizer is None:
            text = " ".join(map(str, ids))
        else:
            pieces = GeneratedText(self._tokenizer.backend, prompt.ids)
            text = "".join([*map(pieces.push, ids), pieces.finish()])
        return Text(title=prompt.title, text=text, ids=ids, finish=finish.value)
