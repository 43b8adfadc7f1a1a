"""Ask a served model, or the same model by the library; prints one JSON line.

Server and client share this process, so the client's work counts as the server's. A process has one
way alone: each thread that computes has a pool of its own, whose idle threads would wait beside the
other's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from . import generation_worker
from .generation_worker import SHAPE, Request

NAME: Final = "llama"
Answers = Callable[[Sequence[Request]], list[int]]
"""Returns the number of new tokens of each answer."""


def write(folder: Path) -> None:
    """Write the model of ``generation_worker`` with a tokenizer of so many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    generation_worker.write(folder)
    words = {f"word{number}": number for number in range(SHAPE.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def by_library(session: Any) -> Answers:
    """The library call: a session's texts, piece by piece."""
    from ascend_run.ops.generation.engine import Request as Ours

    def answers(given: Sequence[Request]) -> list[int]:
        counts = {
            session.submit(Ours(prompt=tuple(prompt), max_new_tokens=new)): 0
            for prompt, new in given
        }
        while not session.is_idle:
            for piece in session.step():
                counts[piece.emitted.sequence] += 1
        return [*counts.values()]

    return answers


def by_server(port: int) -> Answers:
    """Streamed completions, one connection for each request."""

    def answer(request: Request) -> int:
        prompt, new = request
        body = {"model": NAME, "prompt": prompt, "max_tokens": new, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        usage = None
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as line:
            headers = {"content-type": "application/json"}
            line.request("POST", "/v1/completions", json.dumps(body), headers)
            for event in line.getresponse():
                if event.startswith(b"data: {"):
                    usage = json.loads(event.removeprefix(b"data: ")).get("usage") or usage
        assert usage is not None, "the stream ended before its usage"
        return int(usage["completion_tokens"])

    def answers(given: Sequence[Request]) -> list[int]:
        with ThreadPoolExecutor(len(given)) as pool:
            return [*pool.map(answer, given)]

    return answers


@contextmanager
def both(folder: Path) -> Iterator[dict[str, Answers]]:
    """Serve the model; the library uses its session while no request is open."""
    from ascend_run.tools.serve.app import Service
    from ascend_run.tools.serve.engine_thread import EngineThread
    from ascend_run.tools.serve.limits import Limits
    from ascend_run.tools.serve.opening import ServeQuestion, opened
    from ascend_run.tools.serve.server import listening, server_of

    question = ServeQuestion(model=folder, name=NAME)
    with opened(question) as (model, session), EngineThread(session) as engine:
        limits = Limits()
        service = Service(model=model, engine=engine, limits=limits)
        server = server_of(service.app(), limits)
        with closing(listening("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                port = listener.getsockname()[1]
                yield {"library": by_library(session), "served": by_server(port)}
            finally:
                server.should_exit = True
                thread.join(60)


def seconds(answers: Answers, given: Sequence[Request], steps: int, warmup: int) -> float:
    """Return the median of so many calls."""
    import torch

    found = []
    wanted = [new for _, new in given]
    with torch.no_grad():
        for step in range(warmup + steps):
            begin = time.perf_counter()
            assert answers(given) == wanted
            if step >= warmup:
                found.append(time.perf_counter() - begin)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=("write", "library", "served"))
    parser.add_argument("work", choices=("none", "one", "batch"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {}
    if options.system == "write":
        write(options.folder)
    else:
        given = generation_worker.requests(options.work)
        with both(options.folder) as ways:
            taken = seconds(ways[options.system], given, options.steps, options.warmup)
        found = {"seconds": taken, "tokens": sum(new for _, new in given)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
