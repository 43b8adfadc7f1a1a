"""The command line of ``ascend-run serve``. Imports no torch until it runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

import click

from ascend_run.plugin_api.errors import ConfigError
from ascend_run.tools.convert.source_options import SourceOptions, source_options
from ascend_run.tools.generate.model_options import (
    dtype_option,
    rope_length_option,
    template_option,
    tokenizer_option,
)

from .limits import Limits

_PACKAGES: Final = ("starlette", "uvicorn")


@click.command("serve")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at; 0.0.0.0 is every one of this machine.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0 takes a free one.",
)
@click.option("--api-key", metavar="KEY", help="Answer requests with this key only.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the key; unlike --api-key, other users do not see it.",
)
@click.option("--name", help="Name of the model in requests; default: that of its folder.")
@tokenizer_option
@template_option
@source_options
@dtype_option
@rope_length_option
@click.option(
    "--max-sequences",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Requests that run at a time; others wait in order.",
)
@click.option(
    "--cache-tokens",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens that the key-value cache has room for; default: as many as --max-sequences of the "
    "longest texts have, and at most half of the free memory.",
)
@click.option(
    "--max-prompt-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Longest prompt; default: as long as the model's positions and the cache reach.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Longest answer that a request may ask for; default: likewise.",
)
@click.option(
    "--max-body-bytes",
    type=click.IntRange(min=1),
    default=1 << 20,
    show_default=True,
    help="Largest body of a request.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Requests that wait; one more is refused with 503.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Longest time of a request, waiting and running.",
)
def command(**given: Any) -> int:
    """Answer requests of OpenAI's API with a stored model.

    \b
    ascend-run serve runs/demo
    ascend-run serve /models/llama --port 9000 --api-key-file key.txt

    MODEL is what generate takes. The page at / talks to the model. An interrupt (Ctrl-C) ends the
    server.
    """
    _require_packages()
    key = _key(given.pop("api_key"), given.pop("api_key_file"))
    limits = Limits(
        max_open=given["max_sequences"] + given.pop("max_queue"),
        **{
            name: given.pop(name)
            for name in ("max_prompt_tokens", "max_new_tokens", "max_body_bytes", "max_seconds")
        },
    )
    host, port = given.pop("host"), given.pop("port")
    options: SourceOptions = given.pop("source_options")
    from .opening import ServeQuestion
    from .server import serve

    serve(ServeQuestion(options=options, **given), host, port, key, limits)
    return 0


def _require_packages() -> None:
    """
    Raises:
        ConfigError: A package of the extra is not installed.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "the server needs packages that are not installed",
            [f"{', '.join(missing)}: pip install 'ascend-run[serve]'"],
        )


def _key(key: str | None, file: Path | None) -> str | None:
    """
    Raises:
        UsageError: There are two, or the file cannot be read, or the key is empty.
    """
    if key is not None and file is not None:
        raise click.UsageError("--api-key and --api-key-file both name a key; give one")
    if file is not None:
        try:
            key = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = getattr(problem, "strerror", None) or problem
            raise click.UsageError(f"--api-key-file {file} cannot be read: {reason}") from None
    if key is not None and not (key := key.strip()):
        raise click.UsageError(f"the API key of {file or '--api-key'} is empty")
    return key
