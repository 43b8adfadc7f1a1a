"""The server's process: its socket, its event loop, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
from collections.abc import Iterator
from typing import Any, cast

import click
import uvicorn
from starlette.types import ASGIApp

from ascend_run.plugin_api.errors import ConfigError

from .app import Service
from .connections import Connection
from .engine_thread import EngineThread
from .guard import LOOPBACK
from .limits import Limits
from .opening import ServeQuestion, opened

_GRACE_SECONDS = 5
"""For requests that run when the server ends."""


def serve(question: ServeQuestion, host: str, port: int, key: str | None, limits: Limits) -> None:
    """Serve a model until an interrupt or SIGTERM.

    Raises:
        AscendRunError: The model cannot be opened, or the address cannot be listened at.
    """
    with contextlib.closing(listening(host, port)) as listener, opened(question) as served:
        model, session = served
        with EngineThread(session) as engine:
            hosts = LOOPBACK if host in LOOPBACK else None
            service = Service(model=model, engine=engine, limits=limits, key=key, hosts=hosts)
            server = server_of(service.app(), limits)
            engine.on_failure = lambda: setattr(server, "should_exit", True)
            address, number = listener.getsockname()[:2]
            shown = f"[{address}]" if ":" in address else address
            click.echo(f"{model.name} is served at http://{shown}:{number}/", err=True)
            if model.template is None:
                click.echo(
                    f"it has no chat template, so it does not chat: {model.no_template}", err=True
                )
            if hosts is None and key is None:
                click.echo("anyone who reaches this address can use it: no --api-key", err=True)
            with _terminable(), contextlib.suppress(KeyboardInterrupt):
                server.run(sockets=[listener])
        if engine.failure is not None:
            raise engine.failure


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: The address is unknown, or in use.
    """
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as problem:
        reason = (problem.strerror or str(problem)).partition(" (")[0]
        raise ConfigError(
            "the server cannot start", [f"--host {host} --port {port}: {reason}; name another one"]
        ) from None


def server_of(app: ASGIApp, limits: Limits) -> uvicorn.Server:
    """Return a server of an application, with the choices of this command."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http=cast(Any, functools.partial(Connection, limits)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
    )


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as an interrupt, so that what is open is closed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
