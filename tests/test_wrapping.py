"""Streamed text on a terminal: lines end between words, whatever pieces it comes in."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies

from otaro.wrapping import WordWrap


def wrapped(text: str, width: int | None, pieces: list[int] | None = None) -> str:
    """The text pushed in pieces of these lengths, over and over."""
    out: list[str] = []
    writer = WordWrap(out.append, lambda: width)
    place = 0
    while place < len(text):
        for length in pieces or [len(text)]:
            writer.push(text[place : place + length])
            place += length
    writer.finish()
    return "".join(out)


def test_lines_end_between_words() -> None:
    assert wrapped("one two three four\nfive  six", 9) == "one two\nthree\nfour\nfive  six\n"
    assert wrapped("one two", 7) == "one two\n"
    assert wrapped("one two", 6) == "one\ntwo\n"
    assert wrapped("  - one two", 7) == "  - one\ntwo\n"


def test_what_is_no_terminal_gets_the_text_as_it_is() -> None:
    text = "a long line, " * 100
    assert wrapped(text, None, [3]) == text + "\n"


def test_a_long_word_has_a_line_of_its_own_and_is_not_broken() -> None:
    address = "https://example.com/a/long/path"
    assert wrapped(f"see {address} for more", 12) == f"see\n{address} for\nmore\n"
    # The terminal breaks it after 12 and 24 columns: 7 are taken on its last line, and 4 more have room.
    assert len(address) % 12 == 7


@pytest.mark.parametrize(
    "code",
    [
        "```python\nprint('a line of code that is long')\n```\n",
        "~~~\na line of code that is long\n~~~\n",
        "    x = call(a, line, of, code)\n",
        "\tx = call(a, line, of, code)\n",
    ],
)
def test_lines_of_code_are_left_alone(code: str) -> None:
    words = "and then some words\n"
    assert wrapped(code + words, 12, [2]) == code + "and then\nsome words\n\n"


def test_what_only_looks_like_code_is_wrapped() -> None:
    assert wrapped("    - an item in a list", 14) == "    - an item\nin a list\n"
    assert wrapped("```x``` is inline\nnot code at all", 10) == "```x``` is inline\nnot code\nat all\n"


def test_chinese_breaks_between_characters_but_not_before_a_full_stop() -> None:
    assert wrapped("一二三四五六。七八", 12) == "一二三四五\n六。七八\n"
    assert wrapped("ab一二「三」", 8) == "ab一二\n「三」\n"
    assert wrapped("단어 단어", 6) == "단어\n단어\n"


def test_characters_of_several_code_points_stay_whole() -> None:
    for character in ("👍🏽", "🇩🇪", "👩‍👩‍👧‍👦", "e\u0301"):
        assert character in wrapped(f"一二三{character}四五六", 8)


def test_a_terminal_that_was_resized() -> None:
    out: list[str] = []
    width = 20
    writer = WordWrap(out.append, lambda: width)
    writer.push("one two three four ")
    width = 8
    # The terminal has broken the line anew, after 8 and 16 columns.
    writer.push("five six seven ")
    width = 12
    writer.push("eight nine ten")
    writer.finish()
    assert "".join(out) == "one two three four five\nsix\nseven eight\nnine ten\n"


def test_a_remark_within_the_text_takes_room() -> None:
    out: list[str] = []
    writer = WordWrap(out.append, lambda: 12)
    writer.push("one two")
    writer.mark("[E5M5] ", out.append)
    writer.push("three four")
    writer.finish()
    assert "".join(out) == "one two\n[E5M5] three\nfour\n"


TEXT = strategies.text(alphabet="ab \t\n-`一。🙂é", max_size=60)


@settings(max_examples=300, deadline=None)
@given(TEXT, strategies.integers(2, 12), strategies.lists(strategies.integers(1, 4), min_size=1, max_size=5))
def test_wrapping_adds_line_ends_alone(text: str, width: int, pieces: list[int]) -> None:
    result = wrapped(text, width, pieces)
    assert result == wrapped(text, width)
    assert re.sub(r"\s", "", result) == re.sub(r"\s", "", text)


@settings(max_examples=200, deadline=None)
@given(strategies.lists(strategies.integers(1, 9), min_size=1, max_size=12), strategies.integers(2, 8))
def test_a_terminal_breaks_only_words_that_are_longer_than_its_lines(lengths: list[int], width: int) -> None:
    column = 0
    for word in re.findall(r"x+|[ \n]", wrapped(" ".join("x" * length for length in lengths), width)):
        if word == "\n":
            column = 0
            continue
        assert column + len(word) <= width or (column == 0 and len(word) > width)
        column = (column + len(word) - 1) % width + 1
