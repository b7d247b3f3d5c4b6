"""The page: what its files may not hold, and all of it in a real browser where there is one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from otaro.precision import Precision
from otaro.serve.static import PAGE
from tests.serving import Paced, PacedRunning, Served, open_paced, serving, until

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
in_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here to show the page")
FILES = {name: (resources.files("otaro.serve") / "page" / name).read_text("utf-8") for name, _ in PAGE.values()}


# ---- the files


def test_the_page_is_all_there_is() -> None:
    assert {entry.name for entry in (resources.files("otaro.serve") / "page").iterdir()} == {*FILES}


@pytest.mark.parametrize("name", FILES)
def test_the_page_fetches_nothing_from_elsewhere_and_makes_no_html_of_text(name: str) -> None:
    text = FILES[name].replace('xmlns="http://www.w3.org/2000/svg"', "").replace('"http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.search(r"\son\w+=|\sstyle=|javascript:", text)


class Labels(HTMLParser):
    """Which fields a page has, and which of them are labelled."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, bool] = {}
        self.labelled: set[str] = set()
        self._within = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag == "label":
            self.labelled.add(found.get("for") or "")
            self._within = "for" not in found
        if tag in ("input", "select", "textarea"):
            self.fields[found.get("id") or found.get("value") or ""] = self._within

    def handle_endtag(self, tag: str) -> None:
        if tag == "label":
            self._within = False


def test_every_field_has_a_label() -> None:
    labels = Labels()
    labels.feed(FILES["index.html"])
    assert len(labels.fields) > 10
    assert [id for id, within in labels.fields.items() if not within and id not in labels.labelled] == []


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


class Page:
    """The page of a server whose tokens come when they are asked for."""

    def __init__(self, page: Any, served: Served, paced: Paced) -> None:
        self.page, self.served, self.paced = page, served, paced
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda line: line.type == "error" and self.complaints.append(line.text))
        page.goto(served.url)
        until(lambda: "ready" in self.text("#health"))

    def text(self, place: str) -> str:
        found = self.page.locator(place)
        return str(found.last.inner_text()) if found.count() else ""

    def ask(self, text: str, answers: int = 1) -> list[PacedRunning]:
        self.page.fill("#prompt", text)
        self.page.keyboard.press("Enter")
        until(lambda: len(self.paced.open) == answers)
        return self.paced.open

    def write(self, running: PacedRunning, text: str) -> None:
        for letter in text:
            self.paced.step(running, letter)


@pytest.fixture
def page(browser: Any, packed_llama: Path) -> Iterator[Page]:
    service, paced = open_paced(packed_llama)
    with serving(service) as served:
        context = browser.new_context(viewport={"width": 390, "height": 800})
        page = Page(context.new_page(), served, paced)
        yield page
        assert page.complaints == []
        context.close()


@in_browser
def test_a_chat_whose_precision_is_a_slider(page: Page) -> None:
    (running,) = page.ask("Hello")
    assert running.precision == Precision.E5M8
    page.write(running, "<b>wide</b> ")
    until(lambda: "<b>wide</b>" in page.text(".assistant .text"))  # as text, and not as HTML
    page.page.fill("#width", "3")
    until(lambda: running.precision == Precision.E5M3)
    assert page.text("#shown") == "E5M3"
    page.write(running, "narrow")
    until(lambda: "narrow" in page.text(".assistant .text"))
    assert page.page.locator(".assistant .pill").all_inner_texts() == ["E5M8", "E5M3"]
    page.page.focus("#prompt")
    page.page.keyboard.press("Alt+ArrowUp")
    until(lambda: running.precision == Precision.E5M4)
    page.page.check("#auto")
    until(lambda: running.precision == Precision.E5M8)  # nobody waits
    page.page.uncheck("#auto")
    assert page.page.is_visible("#stop")
    running.end("stop")
    until(lambda: "tokens" in page.text(".assistant .note"))
    assert page.page.is_visible("#send")
    assert "18 tokens" in page.text("#announcement")
    assert re.fullmatch(r"\d\.\d\d", page.text("#bits"))
    assert "MB" in page.text("#memory")

    # The conversation goes on, and outlives the page.
    (second,) = page.ask("And then?")
    assert second.precision == Precision(page.text("#shown"))
    page.write(second, "this")
    until(lambda: "this" in page.text(".assistant .text"))
    page.page.reload()
    until(lambda: not page.paced.open)  # nobody reads it any more
    assert second.finish_reason == "cancelled"
    until(lambda: "ready" in page.text("#health"))
    assert page.page.locator(".message").count() == 4
    assert "narrow" in page.page.locator(".assistant .text").first.inner_text()
    page.page.click("#fresh")
    assert page.page.locator(".message").count() == 0
    assert page.page.is_visible("#welcome")


@in_browser
def test_a_message_does_not_wait_for_what_the_page_asks_first(browser: Any, packed_llama: Path) -> None:
    service, paced = open_paced(packed_llama)
    with serving(service) as served:
        context = browser.new_context()
        page = context.new_page()
        waiting: list[Any] = []
        for path in ("health", "v1/models", "v1/precision"):
            page.route(f"**/{path}", lambda route: waiting.append(route))
        page.goto(served.url)
        page.fill("#prompt", "Hello")
        page.keyboard.press("Enter")
        until(lambda: len(paced.open) == 1)
        assert paced.open[0].precision is None  # whatever the server takes by itself
        assert page.locator(".message").count() == 2
        assert page.is_hidden("#alert")
        assert len(waiting) == 2
        context.close()


@in_browser
def test_the_slider_counts_while_a_message_waits(page: Page) -> None:
    others = page.served.service.limits.seats
    with ExitStack() as leaving:
        for number in range(others):
            leaving.enter_context(page.served.stream({}))
            until(lambda number=number: len(page.paced.open) == number + 1)
        page.page.fill("#prompt", "Hello")
        page.page.keyboard.press("Enter")
        until(lambda: page.served.service.queue.waiting == 1)
        page.page.fill("#width", "3")
        page.paced.open[0].end("stop")
        until(lambda: len(page.paced.all) == others + 1)
        running = page.paced.all[-1]
        assert running.request.precision == Precision.E5M8
        until(lambda: running.precision == Precision.E5M3)
        running.end("stop")


@in_browser
@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_is_stopped(page: Page, how: str) -> None:
    (running,) = page.ask("Hello")
    page.write(running, "text")
    until(lambda: "text" in page.text(".assistant .text"))
    if how == "button":
        page.page.click("#stop")
    else:
        page.page.keyboard.press("Escape")
    until(lambda: running.finish_reason == "cancelled")
    until(lambda: "stopped" in page.text(".assistant .note"))
    until(lambda: page.served.service.queue.running == 0)
    assert page.page.is_visible("#send")


@in_browser
def test_two_precisions_side_by_side(page: Page) -> None:
    page.page.check("input[value=compare]", force=True)
    page.page.select_option("#width-right", "E5M4")
    left, right = sorted(page.ask("Hello", 2), key=lambda one: one.precision or Precision.E5M3, reverse=True)
    assert [left.precision, right.precision] == [Precision.E5M8, Precision.E5M4]
    assert left.request.sampling.temperature == right.request.sampling.temperature == 0
    page.write(left, "the sea is deep and blue")
    page.write(right, "the sea is wide and blue too")
    for running in (left, right):
        running.end("stop")
    until(lambda: page.text("#difference"))
    assert page.text("#difference") == "1 words are only in E5M8, 2 only in E5M4."
    assert page.page.locator("#text-left mark").all_inner_texts() == ["deep"]
    assert page.page.locator("#text-right mark").all_inner_texts() == ["wide", "too"]


@in_browser
def test_what_goes_wrong_is_said(page: Page) -> None:
    (running,) = page.ask("Hello")
    page.write(running, "text")
    running.end("error")
    until(lambda: "could not go on" in page.text("#alert"))
    page.page.fill("#prompt", "x" * 500)
    page.page.keyboard.press("Enter")
    until(lambda: "context" in page.text("#alert"))
    page.complaints.clear()  # the browser reports the answer 400
    assert page.page.input_value("#prompt") == "x" * 500  # to be shortened
    assert page.page.locator(".message").count() == 2
    (running,) = page.ask("Hello again")
    assert not page.page.is_visible("#alert")
    running.end("stop")


@in_browser
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(browser: Any, packed_llama: Path, width: int, scheme: str) -> None:
    service, paced = open_paced(packed_llama)
    with serving(service) as served:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = Page(context.new_page(), served, paced)
        (running,) = page.ask("word" * 30)
        page.write(running, "answer" * 10)
        running.end("stop")
        until(lambda: "tokens" in page.text(".assistant .note"))
        assert page.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.page.is_visible("#width")
        background = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, re.findall(r"\d+", background)[:3])) > 382
        assert light == (scheme == "light")
        context.close()


@in_browser
def test_a_key_is_asked_for_on_the_page(browser: Any, packed_llama: Path) -> None:
    service, _ = open_paced(packed_llama)
    with serving(service, keys=["key"]) as served:
        context = browser.new_context()
        page = context.new_page()
        page.goto(served.url)
        until(lambda: page.locator("#health").inner_text() == "needs an API key")
        page.fill("#key", "key")
        page.keyboard.press("Tab")
        until(lambda: page.locator("#health").inner_text() == "ready")
        context.close()
