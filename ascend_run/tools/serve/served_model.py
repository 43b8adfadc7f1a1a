"""What the server knows of its model: requests of OpenAI's API to requests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import attrs

from ascend_run.ops.generation.engine import Request
from ascend_run.text.templates import ChatTemplate, TemplateRefusal
from ascend_run.tools.generate.chat_texts import chat_ids
from ascend_run.tools.generate.texts import Texts

from .asked import Asked
from .errors import ApiError
from .limits import Limits
from .messages import Message


@attrs.frozen(kw_only=True, eq=False)
class ServedModel:
    """A model under the name that requests give."""

    name: str
    created: int  #: Unix time of its start.
    texts: Texts
    template: ChatTemplate | None
    """Of chats; None: there is none."""
    no_template: str = ""
    """Why there is none; of the server's own folders, so no client gets it."""
    max_length: int
    """Longest prompt and answer together: the model's positions, or the cache."""
    vocab_size: int

    def requests(self, asked: Asked, limits: Limits) -> list[Request]:
        """Encode the prompts and check their lengths.

        The draws of the first one are those of the seed; each other one has its own.

        Raises:
            ApiError: The model is another one, or a prompt cannot be answered.
        """
        if asked.model != self.name:
            raise self.another(asked.model)
        param = "messages" if asked.messages else "prompt"
        if asked.messages:
            encoded = [self._of_chat(asked.messages, asked.tools)]
        else:
            encoded = [
                self.texts.ids(one) if isinstance(one, str) else one for one in asked.prompts
            ]
        found = []
        for index, ids in enumerate(encoded):
            self._require_ids(ids, param, f"{param}[{index}]" if len(encoded) > 1 else param)
            sampling = asked.sampling
            request = Request(
                prompt=ids,
                max_new_tokens=self._max_new_tokens(ids, asked, limits, param),
                end_ids=self.texts.end_ids,
                sampling=sampling.of_prompt(index) if index else sampling,
            )
            found.append(request)
        return found

    def another(self, name: str) -> ApiError:
        """Return the error of a request for a model that is not this one."""
        return ApiError(
            f"the model {name!r} does not exist; this server has {self.name!r}",
            HTTPStatus.NOT_FOUND,
            param="model",
            code="model_not_found",
        )

    def _require_ids(self, ids: Sequence[int], param: str, name: str) -> None:
        """
        Raises:
            ApiError: There are none, or one is none of the model's.
        """
        if not ids:
            raise ApiError(
                f"{name} is empty, and the tokenizer adds no token that begins a text",
                param=param,
            )
        for number in (min(ids), max(ids)):
            if not 0 <= number < self.vocab_size:
                raise ApiError(
                    f"the token id {number} of {name} is none of the model's: it has "
                    f"{self.vocab_size}",
                    param=param,
                )

    def _of_chat(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[int, ...]:
        if self.template is None:
            raise ApiError(
                "this model has no chat template; ask /v1/completions, or start the server with "
                "--template",
                param="messages",
            )
        if tools and "tools" not in self.template.source:
            raise ApiError("the chat template of the model has no form for tools", param="tools")
        try:
            return chat_ids(self.texts, self.template, messages, tools)
        except TemplateRefusal as problem:
            raise ApiError(
                f"the chat template of the model refuses the messages: {problem}",
                param="messages",
            ) from None

    def _max_new_tokens(self, ids: Sequence[int], asked: Asked, limits: Limits, param: str) -> int:
        """
        Raises:
            ApiError: The prompt, the answer, or both together are too long.
        """
        longest = self.max_length - 1
        if limits.max_prompt_tokens is not None:
            longest = min(longest, limits.max_prompt_tokens)
        if len(ids) > longest:
            raise ApiError(
                f"the prompt has {len(ids)} tokens, and the longest one here {longest}; shorten it",
                param=param,
                code="context_length_exceeded",
            )
        left = self.max_length - len(ids)
        most = left if limits.max_new_tokens is None else min(left, limits.max_new_tokens)
        if asked.max_new_tokens is None:
            return most
        if asked.max_new_tokens > left:
            raise ApiError(
                f"{len(ids)} tokens and {asked.max_new_tokens} new ones are "
                f"{len(ids) + asked.max_new_tokens}, and the longest text here has "
                f"{self.max_length}; shorten the prompt, or ask for at most {left} new ones",
                param=param,
                code="context_length_exceeded",
            )
        if asked.max_new_tokens > most:
            raise ApiError(
                f"{asked.max_new_tokens} new tokens are asked for, and the longest answer here "
                f"has {most}",
                param="max_tokens",
            )
        return asked.max_new_tokens
