"""Chat templates: Jinja in the same sandbox as in transformers. No torch.

A template's own ``{% generation %}`` blocks, which delimit what the model writes, are rendered with
markers around their text; see ``turns``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from .skeletons import Skeletons
from .template_records import NAMED

BEGIN: Final = "\U0010fff0"
END: Final = "\U0010fff1"
"""Markers around what a ``{% generation %}`` block renders: noncharacter code points."""
MARK: Final = "\U0010fff2"
"""Marker that ``turns`` substitutes for a message, to find where it is rendered."""


class TemplateRefusal(Exception):
    """A template cannot render a conversation; the message gives the reason."""


@attrs.frozen(kw_only=True)
class ChatTemplate:
    """A compiled template and the variables of every rendering."""

    source: str
    """The Jinja text."""
    name: str
    """Where the template comes from, for error messages."""
    variables: Mapping[str, str]
    """``bos_token`` and similar."""
    date: str | None
    date_option: str = "plugins.sft.date"
    """The option that sets the date, for error messages."""
    copies_contents: bool = attrs.field(init=False, eq=False)
    """Whether contents of messages do not affect the text around them; see ``content_flow``."""
    skeletons: Skeletons = attrs.field(factory=Skeletons, init=False, eq=False)
    _compiled: Any = attrs.field(init=False, eq=False)

    @property
    def renders_calls(self) -> bool:
        """Whether there is a form for calls of tools."""
        return "tool_calls" in self.source

    def __attrs_post_init__(self) -> None:
        compiled, copies = _compile(self.source, self.name, self.date)
        object.__setattr__(self, "_compiled", compiled)
        object.__setattr__(self, "copies_contents", copies)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: object = None,
        documents: object = None,
        *,
        prompt: bool = False,
    ) -> str:
        """Render messages to text; with ``prompt``, up to where the assistant would start.

        Raises:
            TemplateRefusal: The template raises an error, or uses an undefined variable.
        """
        from jinja2.exceptions import TemplateError

        try:
            text: str = self._compiled.render(
                messages=list(messages),
                tools=tools,
                documents=documents,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except TemplateError as error:
            hint = ""
            if "strftime_now" in str(error):
                hint = f"; set {self.date_option} to the date to pass to it"
            raise TemplateRefusal(f"{error}{hint}") from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from None
        return text


def template_source(
    choice: str | None,
    folder: Path,
    tokenizer_config: Mapping[str, object],
    option: str = "plugins.sft.template",
    *,
    tools: bool = False,
) -> tuple[str, str]:
    """Return the text of the template that a run uses, and where it comes from.

    Args:
        choice: What the user chose.
        folder: The tokenizer's folder.
        option: The option that chooses, for error messages.
        tools: Whether it is to render tools.

    Raises:
        ValueError: There is no template; the message says what to do.
    """
    if choice is not None and choice in NAMED:
        return NAMED[choice].jinja(), f"the template {choice!r}"
    if choice is not None:
        path = Path(choice)
        if path.suffix != ".jinja":
            raise ValueError(
                f"{option}={choice!r}: expected one of {', '.join(NAMED)}, or a file "
                "that ends in .jinja"
            )
        if not path.is_file():
            raise ValueError(f"{option}={choice!r} does not exist")
        return path.read_text(encoding="utf-8"), str(path)
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8"), str(own)
    stored = tokenizer_config.get("chat_template")
    if isinstance(stored, list):
        # Several templates, by name; the others are for retrieval.
        by_name = {entry.get("name"): entry.get("template") for entry in stored}
        stored = (by_name.get("tool_use") if tools else None) or by_name.get("default")
    if not isinstance(stored, str):
        raise ValueError(
            f"{folder} has no chat template, neither in tokenizer_config.json nor in "
            f"chat_template.jinja; choose {option}={'|'.join(NAMED)}, or a .jinja file"
        )
    return stored, f"{folder / 'tokenizer_config.json'}"


def _compile(source: str, name: str, date: str | None) -> tuple[Any, bool]:
    """Return the compiled template, and whether it copies contents.

    Raises:
        ValueError: Its syntax is wrong.
    """
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from .content_flow import copies_contents

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

        def parse(self, parser: Any) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (
                nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END)
            )
            return [begin, *body, end]

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    if date is not None:
        environment.globals["strftime_now"] = _strftime(date)
    try:
        template = environment.from_string(source)
        copies = copies_contents(environment.parse(source))
    except TemplateSyntaxError as error:
        raise ValueError(f"{name} is no Jinja template: {error}") from None
    # Jinja chains two mappings, and copies them at each rendering: a fifth of its time.
    template.globals = dict(template.globals)
    return template, copies


def _strftime(date: str) -> Callable[[str], str]:
    day = datetime.datetime.fromisoformat(date)
    return day.strftime


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize to plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
