"""Streamed text for a terminal: lines end between words.

A word is held back until it is known on which line it stands: until the next one begins, or until it is too long for
this line. A word longer than a whole line, such as a web address, is left to the terminal, which breaks it without a
line end, so that it can still be copied as one. So are lines of code, within fences or indented.

Chinese and Japanese have no spaces: there a line may end between any two characters but those that may not begin or end
one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from rich.cells import cell_len

TAB = 8
# What begins no line: closing brackets and quotes, full stops and commas, small kana, marks of length and repetition.
NEVER_FIRST = frozenset(
    "、。，．・：；？！％」』）］｝〉》】〕〗〙〟’”…‥ーゝゞ々ぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮヵヶ,.:;?!%)]}'\""
)
NEVER_LAST = frozenset("「『（［｛〈《【〔〖〘〝‘“([{￥＄$")
JOINER = "\u200d"
FENCE = re.compile(r"\s*(```|~~~)")
INDENTED_CODE = re.compile(r"(    |\t)\s*[^\s*+\d-]")
"""But not a list within a list."""
LONGEST_START = 80
"""Characters of a line that tell whether it is code."""


class WordWrap:
    """Writes pieces of text as they come; `width` is the terminal's now, None where lines are not to be broken.

    `spell` gives a piece as the terminal will show it.
    """

    def __init__(
        self, write: Callable[[str], None], width: Callable[[], int | None], spell: Callable[[str], str] = str
    ) -> None:
        self._write, self._width, self._spell = write, width, spell
        self.begun = False
        """There is something that `finish` must end."""
        self._room = 0
        self._column = 0
        self._space = ""  # before the word that is held back
        self._word = ""
        self._placed = False  # the word stands on its line: more of it is written at once
        self._line = ""  # the beginning of this line of the text
        self._fenced = False

    def push(self, text: str) -> None:
        """More of the text."""
        room = self._width()
        self.begun = True
        if room is None:
            self._write(text)
            return
        if room != self._room:
            self._room = max(room, 1)
            self._column = min(self._column, (self._column - 1) % self._room + 1)  # a line too long now was broken
        written = "".join(map(self._next, self._spell(text)))
        if written:
            self._write(written)

    def mark(self, text: str, write: Callable[[str], None]) -> None:
        """Put a remark where the text is now, by a way of its own."""
        held = self._place()
        if self._width() is not None and self._end(text.rstrip()) > self._room:
            held += "\n"
            self._column = 0
        if held:
            self._write(held)
        write(text)
        self._column = self._end(text)

    def finish(self) -> None:
        """The rest of the text, and the end of its last line."""
        self._write(self._place() + "\n")

    def _next(self, letter: str) -> str:
        """What can be written after one more letter."""
        if letter == "\n":
            written = self._place() + "\n"
            if _is_fence(self._line):
                self._fenced = not self._fenced
            self._column, self._space, self._line = 0, "", ""
            return written
        if len(self._line) < LONGEST_START:
            self._line += letter
        if letter in " \t":
            written = self._place()
            self._space += letter
            return written
        written = self._place() if self._word and _may_break(self._word[-1], letter) else ""
        self._word += letter
        if self._placed:
            self._advance(letter)
            return written + letter
        if self._column == 0 or self._is_code():
            return written + self._put()
        if self._end(self._space + self._word) > self._room:
            self._column, self._space = 0, ""
            return written + "\n" + self._put()
        return written

    def _place(self) -> str:
        """End the word; what of it was held back."""
        written = "" if self._placed or not self._word else self._put()
        self._word, self._placed = "", False
        return written

    def _put(self) -> str:
        """Write what is held back on this line."""
        written = self._space + self._word
        self._advance(written)
        self._space, self._placed = "", True
        return written

    def _is_code(self) -> bool:
        return self._fenced or FENCE.match(self._line) is not None or INDENTED_CODE.match(self._line) is not None

    def _end(self, text: str) -> int:
        """The column after a text on this line."""
        column = self._column
        for part in re.split("(\t)", text):
            column += TAB - column % TAB if part == "\t" else cell_len(part)
        return column

    def _advance(self, text: str) -> None:
        """Note what has been written; the terminal breaks what is too long."""
        for letter in text:
            end = self._end(letter)
            self._column = end if end <= self._room else end - self._column


def _is_fence(line: str) -> bool:
    match = FENCE.match(line)
    return match is not None and "`" not in line[match.end() :].lstrip("`")


def _may_break(before: str, after: str) -> bool:
    """Whether a line may end between two characters that have no space between them."""
    if not (_stands_alone(before) or _stands_alone(after)):
        return False
    joined = JOINER in (before, after) or cell_len(after) == 0 or "\U0001f3fb" <= after <= "\U0001f3ff"
    flag = all("\U0001f1e6" <= letter <= "\U0001f1ff" for letter in (before, after))
    return not (joined or flag or after in NEVER_FIRST or before in NEVER_LAST)


def _stands_alone(letter: str) -> bool:
    """Whether a line may end beside it: Chinese characters, kana, emoji; Korean has spaces."""
    return unicodedata.east_asian_width(letter) in "WF" and not "\uac00" <= letter <= "\ud7a3"
