"""The page in a real browser: it asks, shows what comes, and lets nothing else in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ascend_run.tools.generate.texts import Texts
from ascend_run.tools.serve.page import page_response
from tests.tools.report.page import Browser, Page, View

from .serving import Served, counting, tiny_texts, until

HOSTILE = "<img src=x onerror='window.planted=1'><script>window.planted=1</script>"


@pytest.fixture
def talk(texts: Texts) -> Iterator[Served]:
    with counting(texts) as server:
        yield server


def opened(browser: Browser, server: Served, **view: object) -> Page:
    return browser.open(f"http://127.0.0.1:{server.port}/", View(**view))  # type: ignore[arg-type]


def send(page: Page, text: str) -> None:
    page.evaluate(f"(at('text').value = {text!r}, at('send').click())")


def turns(page: Page) -> list[str]:
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('.turn')].map(turn => turn.className.slice(5) + ': ' "
        "+ turn.textContent)"
    )
    return found


def notes(page: Page) -> list[str]:
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('.note')].map(note => note.textContent)"
    )
    return found


def until_shown(page: Page, number: int) -> None:
    """Wait for so many notes, which end the answers."""
    until(lambda: len(notes(page)) == number)


def quiet(page: Page, server: Served) -> None:
    """No error, and no request but to the server."""
    assert page.errors() == []
    assert all(url.startswith(f"http://127.0.0.1:{server.port}/") for url in page.requests())


def test_a_chat_goes_on_with_what_was_said(browser: Browser, talk: Served) -> None:
    page = opened(browser, talk)
    assert page.evaluate("document.title") == "tiny"
    page.evaluate("at('tokens').value = 4")
    backend = talk.texts.tokenizer.backend
    send(page, "Hello")
    until_shown(page, 1)
    first = turns(page)[1].removeprefix("assistant: ")
    assert (turns(page)[0], len(first)) == ("user: Hello", 4)
    assert notes(page) == ["4 tokens, finish: length"]
    send(page, "And now?")
    until_shown(page, 2)
    asked = talk.session.submitted[-1]
    assert backend.decode(asked.prompt) == (
        f"user: Hello\nassistant: {first}\nuser: And now?\nassistant:"
    )
    assert (asked.max_new_tokens, asked.sampling.temperature) == (4, 0.8)
    page.evaluate("at('clear').click()")
    assert turns(page) == []
    quiet(page, talk)


def test_what_is_said_is_never_markup(browser: Browser) -> None:
    """Neither of the user nor of the model."""
    with counting(tiny_texts(Path("none"), HOSTILE)) as server:
        markup = server.texts.ids(HOSTILE)
        server.session.says = markup
        page = opened(browser, server)
        page.evaluate(f"at('tokens').value = {len(markup)}")
        send(page, HOSTILE)
        until_shown(page, 1)
        assert turns(page) == [f"user: {HOSTILE}", f"assistant: {HOSTILE}"]
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert page.evaluate("window.planted === undefined")
        quiet(page, server)


def test_stop_ends_the_answer_and_keeps_it(browser: Browser, talk: Served) -> None:
    talk.session.pause_after = 3
    page = opened(browser, talk)
    send(page, "Hello")
    until(lambda: len(turns(page)[-1]) == len("assistant: ") + 3)
    assert page.evaluate("at('send').disabled && !at('stop').disabled")
    page.evaluate("at('stop').click()")
    until_shown(page, 1)
    assert notes(page) == ["stopped"]
    until(lambda: talk.session.cancelled == [1])
    until(lambda: talk.is_rid)
    assert page.evaluate("!at('send').disabled && at('stop').disabled")


def test_clear_ends_the_answer_and_drops_it(browser: Browser, talk: Served) -> None:
    talk.session.pause_after = 3
    page = opened(browser, talk)
    send(page, "Hello")
    until(lambda: len(turns(page)[-1]) == len("assistant: ") + 3)
    page.evaluate("at('clear').click()")
    until(lambda: page.evaluate("!at('send').disabled"))
    assert (turns(page), notes(page)) == ([], [])
    until(lambda: talk.is_rid)
    page.evaluate("at('tokens').value = 2")
    send(page, "And now?")
    until_shown(page, 1)
    prompt = talk.session.submitted[-1].prompt
    assert talk.texts.tokenizer.backend.decode(prompt) == "user: And now?\nassistant:"
    quiet(page, talk)


def test_the_enter_key_sends(browser: Browser, talk: Served) -> None:
    page = opened(browser, talk)
    page.evaluate("(at('text').value = 'Hello', at('text').focus())")
    page.key("Enter")
    until_shown(page, 1)
    assert turns(page)[0] == "user: Hello"


def test_an_error_is_shown_and_the_question_dropped(browser: Browser, talk: Served) -> None:
    page = opened(browser, talk)
    page.evaluate("at('tokens').value = 5000")
    send(page, "Hello")
    until(lambda: any("error: " in turn for turn in turns(page)))
    assert "and the longest text here has 2048" in turns(page)[-1]
    assert page.evaluate("messages.length") == 0


def test_without_a_template_the_text_goes_on(browser: Browser, texts: Texts) -> None:
    with counting(texts, template=None) as server:
        page = opened(browser, server)
        page.evaluate("at('tokens').value = 2")
        send(page, "fox")
        until_shown(page, 2)
        assert notes(page)[0] == "This model has no chat template: it continues the text."
        assert turns(page)[1].startswith("assistant: fox")
        assert texts.tokenizer.backend.decode(server.session.submitted[0].prompt) == "fox"


def test_the_key_is_asked_for_and_sent(browser: Browser, texts: Texts) -> None:
    with counting(texts, key="secret") as server:
        page = opened(browser, server)
        shown = "!at('key').parentElement.hidden"
        assert page.evaluate(shown)
        send(page, "Hello")
        until(lambda: any("error: the API key is missing" in turn for turn in turns(page)))
        page.evaluate("at('key').value = 'secret'")
        send(page, "Hello")
        until_shown(page, 1)
        assert len(server.session.submitted) == 1


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_cut_off(browser: Browser, tiny: Served, width: int) -> None:
    page = opened(browser, tiny, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    quiet(page, tiny)


def test_a_name_is_text_and_the_policy_knows_the_script() -> None:
    answer = page_response('"><script>x</script>', chats=True, asks_key=False)
    text = bytes(answer.body).decode()
    assert 'data-model="&quot;&gt;&lt;script&gt;x&lt;/script&gt;"' in text
    assert text.count("<script>") == 1
    assert "default-src 'none'; connect-src 'self'" in answer.headers["content-security-policy"]
    assert "http" not in text, "nothing of another server"
