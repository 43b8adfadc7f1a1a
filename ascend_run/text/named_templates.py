"""A chat template as the formats of its roles, for tokenizers without one of their own."""

from __future__ import annotations

import json
import re
from typing import Final

import attrs

_SLOT: Final = re.compile(r"\{(content|bos|eos|round)\}")
_VALUES: Final = {
    "bos": "bos_token",
    "eos": "eos_token",
    "round": "((loop.index0 // 2 + 1) | string)",
}


@attrs.frozen(kw_only=True)
class NamedTemplate:
    """The format of each role; ``{content}``, ``{bos}`` and ``{eos}`` stand for their texts.

    ``{round}`` of ``user`` is the number of the user's turn, from 1.
    """

    name: str
    user: str
    prompt: str = ""
    """What begins a turn of the assistant; it is not trained."""
    assistant: str = "{content}{eos}"
    """The rest of a turn of the assistant, which is trained."""
    system: str = "{content}"
    tool: str | None = None
    """A tool's result; None: a conversation with one is rejected."""
    prefix: str = "{bos}"
    default_system: str = ""
    """System message of conversations without one."""
    system_in_user: bool = False
    """Whether the system message stands at the beginning of the first user's content."""

    def jinja(self) -> str:
        """Return the template in Jinja."""
        system, prompt = _expression(self.system, "system"), _expression(self.prompt)
        default = json.dumps(self.default_system)
        own, user, later = f"({system} if system else '')", "content", _expression(self.system)
        if self.system_in_user:
            own = later = "raise_exception('a system message must be followed by the user')"
            own = f"({own} if system and turns and turns[0].role != 'user' else '')"
            user = f"(({system} if system and loop.first else '') + content)"
        if self.tool is None:
            tool = "raise_exception('this template cannot render the result of a tool')"
        else:
            tool = _expression(self.tool)
        return "".join(
            (
                "{% if tools %}",
                "{{ raise_exception('this template cannot render tools') }}{% endif %}",
                "{% if documents %}",
                "{{ raise_exception('this template cannot render documents') }}{% endif %}",
                "{% if messages and messages[0].role == 'system' %}",
                "{% set system, turns = messages[0].content, messages[1:] %}",
                f"{{% else %}}{{% set system, turns = {default}, messages %}}",
                "{% endif %}",
                f"{{{{ {_expression(self.prefix)} + {own} }}}}",
                "{% for message in turns %}{% set content = message.content %}",
                "{% if message.role == 'user' %}",
                f"{{{{ {_expression(self.user, user)} }}}}",
                "{% elif message.role == 'assistant' %}",
                f"{{{{ {_expression(self.prompt + self.assistant)} }}}}",
                f"{{% elif message.role == 'tool' %}}{{{{ {tool} }}}}",
                f"{{% else %}}{{{{ {later} }}}}{{% endif %}}",
                "{% endfor %}",
                f"{{% if add_generation_prompt %}}{{{{ {prompt} }}}}{{% endif %}}",
            )
        )


def _expression(slot: str, content: str = "content") -> str:
    """Return a slot as a Jinja expression."""
    parts = []
    for index, part in enumerate(_SLOT.split(slot)):
        if index % 2:
            parts.append(_VALUES.get(part, content))
        elif part:
            parts.append(json.dumps(part))
    return " + ".join(parts) or "''"
