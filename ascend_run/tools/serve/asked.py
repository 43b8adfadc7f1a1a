"""What a request asks for, by the fields of OpenAI's API."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from ascend_run.ops.generation.sampling import Sampling

from .errors import ApiError
from .fields import Fields, wrong
from .messages import Message, messages_of, tools_of

Prompt = str | tuple[int, ...]

_DEFAULT_COMPLETION: Final = 16
"""New tokens of a completion, as in OpenAI's API."""
_LEAST_TEMPERATURE: Final = 1e-3
"""With a lower one logits may overflow; the most probable token follows, which is its limit."""
_MOST_STOP_WORDS: Final = 4


def _is_false(value: object) -> bool:
    return not value


def _is_one(value: object) -> bool:
    return value == 1 and value is not True


_NEUTRAL: Final[Mapping[str, Callable[[Any], bool]]] = {
    "n": _is_one,
    "presence_penalty": _is_false,
    "frequency_penalty": _is_false,
    "logit_bias": _is_false,
    **dict.fromkeys(("user", "metadata", "store", "service_tier"), lambda value: True),
    **dict.fromkeys(("safety_identifier", "prompt_cache_key"), lambda value: True),
}
"""Not supported, or of no meaning here; with a test of the values that change no answer."""
_OF_COMPLETIONS: Final = {"best_of": _is_one, "echo": _is_false, "suffix": _is_false}
_OF_CHAT: Final[Mapping[str, Callable[[Any], bool]]] = {
    "functions": _is_false,
    "parallel_tool_calls": lambda value: True,
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
}


@attrs.frozen(kw_only=True)
class Asked:
    """A request, of either kind."""

    model: str
    prompts: Sequence[Prompt] = ()
    """Texts or token ids; none of a chat."""
    messages: tuple[Message, ...] = ()
    """Of a chat."""
    max_new_tokens: int | None
    """None: as many as possible."""
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    """Whether a stream ends with the numbers of tokens."""
    tools: tuple[Any, ...] | None = None
    """Functions that the model may call, as chat templates read them."""


def asked_completion(body: Mapping[str, Any]) -> Asked:
    """Read the body of ``/v1/completions``.

    Raises:
        ApiError: A field is missing, wrong, or not supported.
    """
    fields = Fields(body)
    model, prompts = _model(fields), _prompts(fields.any("prompt"))
    logprobs = fields.integer("logprobs", 0, 5)
    max_tokens = fields.integer("max_tokens", 1)
    fields.without_effect(_OF_COMPLETIONS)
    asked = _asked(fields, model, max_tokens or _DEFAULT_COMPLETION, logprobs)
    return attrs.evolve(asked, prompts=prompts)


def asked_chat(body: Mapping[str, Any]) -> Asked:
    """Read the body of ``/v1/chat/completions``.

    Raises:
        ApiError: A field is missing, wrong, or not supported.
    """
    fields = Fields(body)
    model, messages = _model(fields), messages_of(fields.any("messages"))
    tools = tools_of(fields.any("tools"), fields.any("tool_choice"))
    top, wanted = fields.integer("top_logprobs", 0, 20), fields.truth("logprobs")
    if top is not None and not wanted:
        raise ApiError("top_logprobs: no effect without logprobs=true", param="top_logprobs")
    limits = [fields.integer(name, 1) for name in ("max_completion_tokens", "max_tokens")]
    fields.without_effect(_OF_CHAT)
    logprobs = (top or 0) if wanted else None
    asked = _asked(fields, model, limits[0] or limits[1], logprobs)
    return attrs.evolve(asked, messages=messages, tools=tools)


def _asked(
    fields: Fields,
    model: str,
    max_new_tokens: int | None,
    logprobs: int | None,
) -> Asked:
    """Read what both kinds have; no field is left."""
    stop, stream = _stop(fields.any("stop")), fields.truth("stream")
    include_usage = _include_usage(fields.any("stream_options"), stream)
    sampling = _sampling(fields, logprobs)
    fields.without_effect(_NEUTRAL)
    fields.finish()
    return Asked(
        model=model,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        stream=stream,
        include_usage=include_usage,
    )


def _model(fields: Fields) -> str:
    model = fields.text("model")
    if model is None:
        raise ApiError("model is missing; /v1/models names it", param="model")
    return model


def _sampling(fields: Fields, logprobs: int | None) -> Sampling:
    """Temperature and top-p with OpenAI's defaults, and what the library can do beside them."""
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    given = {
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", 0),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100),
    }
    temperature = fields.number("temperature", 0)
    if temperature is None:
        temperature = 1.0
    return Sampling(
        temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
        seed=secrets.randbits(63) if seed is None else seed % 2**63,
        logprobs=logprobs,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, or token ids, or a list of these."""
    values = value if isinstance(value, list) and value and not _is_id(value[0]) else [value]
    for one in values:
        is_ids = isinstance(one, list) and one and all(map(_is_id, one))
        if not isinstance(one, str) and not is_ids:
            raise wrong("prompt", value, "a string, or a list of token ids, or a list of these")
    return tuple(one if isinstance(one, str) else tuple(one) for one in values)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stop(value: Any) -> tuple[str, ...]:
    words: Sequence[Any] = [value] if isinstance(value, str) else value or []
    is_list = isinstance(words, list) and len(words) <= _MOST_STOP_WORDS
    if not is_list or not all(isinstance(word, str) and word for word in words):
        raise wrong("stop", value, f"a string, or a list of at most {_MOST_STOP_WORDS}, not empty")
    return tuple(words)


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream or not isinstance(value, dict):
        raise wrong("stream_options", value, "an object, and stream=true beside it")
    fields = Fields(value)
    include = fields.truth("include_usage")
    fields.without_effect({"include_obfuscation": _is_false})
    fields.finish()
    return include
