"""How the command line talks: results on stdout, everything else on stderr.

So `otaro generate ... | less` and `otaro eval --json - | jq` see the result alone.
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from otaro.errors import OtaroError, printable
from otaro.wrapping import WordWrap

if TYPE_CHECKING:
    from otaro.progress import Progress as ProgressCallback

SECONDS_BETWEEN_LINES = 10.0
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a terminal's cursor, changes its state or turns the direction of its text; and what is no character."""
CUT_OFF = "the answer ends here because of its length: --max-new-tokens allows more"
GAP = 2
"""Columns of the terminal between two columns of a table."""


def results() -> Console:
    """Where results go. Made on each call, because tests and callers swap sys.stdout."""
    return Console(soft_wrap=False, highlight=False)


def print_tables(tables: Sequence[ResultTable]) -> None:
    """Tables as results, with an empty line between them."""
    console = results()
    for table in tables:
        if table is not tables[0]:
            console.print()
        console.print(table)


def notes() -> Console:
    """Where progress, remarks and errors go."""
    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """One remark: in one line whatever its length, but on a terminal with lines between its words."""
    console = notes()
    console.print(shown(text), soft_wrap=not console.is_terminal)


def mark(text: str) -> None:
    """A short remark within a line of streamed text."""
    notes().print(shown(text), end="", style="dim")


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """A progress callback that draws a bar on a terminal, and now and then prints a line in a log."""
    console = notes()
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(description: str, done: int, total: int) -> None:
            bar.update(task, description=shown(printable(description)), completed=done, total=total)

        yield update


def _lines(console: Console) -> ProgressCallback:
    last = time.monotonic()

    def update(description: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES and done < total:
            last = time.monotonic()
            console.print(shown(f"{printable(description)}: {done / total:.0%}"), soft_wrap=True)

    return update


class ResultTable:
    """Figures for a terminal of any width, whole: headings wrap between their words, cells do not wrap.

    Columns that have no room follow in a further table that begins with the first column again.
    """

    def __init__(self, *headings: str, left: int = 1, caption: str | None = None) -> None:
        """`left` columns are text; the others are figures and end on the right."""
        self.headings = headings
        self._left, self._caption = left, caption
        self._rows: list[Sequence[str]] = []
        self._sections: set[int] = set()

    def add_row(self, *cells: str) -> None:
        self._rows.append(cells)

    def add_section(self) -> None:
        """An empty line under what has been added so far."""
        self._sections.add(len(self._rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text | str]:
        room = options.max_width
        parts = self._parts(room)
        for part in parts:
            if part is not parts[0]:
                yield ""
            yield self._table(part, room)
        if self._caption is not None:
            yield Text(self._caption, style="table.caption")

    def _parts(self, room: int) -> list[list[int]]:
        """The columns of each table: as many as have room, one beside the first at least."""
        parts = [[0]]
        used = self._least(0)
        for column in range(1, len(self.headings)):
            if used + GAP + self._least(column) > room and len(parts[-1]) > 1:
                parts.append([0])
                used = self._least(0)
            parts[-1].append(column)
            used += GAP + self._least(column)
        return parts

    def _table(self, columns: list[int], room: int) -> Table:
        result = plain_table()
        widths = [self._least(column) for column in columns]
        free = room - sum(widths) - GAP * (len(columns) - 1)
        for place, column in enumerate(columns):
            more = max(0, cell_len(self.headings[column]) - widths[place])
            if more <= free:
                widths[place] += more
                free -= more
            justify: Literal["left", "right"] = "left" if column < self._left else "right"
            result.add_column(self.headings[column], justify=justify, width=widths[place], overflow="fold")
        for number, row in enumerate(self._rows):
            result.add_row(*(shown(row[column]) for column in columns), end_section=number in self._sections)
        return result

    def _least(self, column: int) -> int:
        """The width that neither breaks a word of the heading nor a cell."""
        words = self.headings[column].split()
        return max(cell_len(text) for text in (*words, *(row[column] for row in self._rows)))


def plain_table() -> Table:
    """A table with a line under its headings and no others, which would take room."""
    # The box has one column of the terminal between two of the table.
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))


def facts_table() -> Table:
    """Names and what they stand for, in two columns; long texts wrap."""
    result = Table(box=None, show_header=False, padding=(0, GAP, 0, 0))
    result.add_column()
    result.add_column(overflow="fold")
    return result


def size_text(size: int) -> str:
    """A number of bytes for people, in the decimal units disks are sold in."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} bytes"


def stream(text: str) -> None:
    """A piece of a model's text: to a pipe or file as it is, to a terminal without what would control it."""
    sys.stdout.write(terminal_text(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def answer_writer() -> WordWrap:
    """Where a streamed answer goes: to a terminal with lines between its words, elsewhere as it is."""
    return WordWrap(stream, _terminal_width, terminal_text)


def _terminal_width() -> int | None:
    """The columns of the terminal that stdout is, as it is now; None where it is none."""
    if not sys.stdout.isatty():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None


def terminal_text(text: str) -> str:
    """A text from a model or a file with its control characters spelt out; lines and tabs stay."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text.replace("\r\n", "\n"))


def shown(text: str) -> str:
    """A text for rich to print as it is, brackets too, whatever file it came from."""
    return escape(terminal_text(text))


def tolerate_any_text() -> None:
    """A character that the terminal's encoding lacks is spelt out, and input that is none is told apart later."""
    shown, kept = "backslashreplace", "surrogateescape"
    for stream, errors in ((sys.stdout, shown), (sys.stderr, shown), (sys.stdin, kept)):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def given_text(text: str, name: str) -> str:
    """A text that was typed, in UTF-8 whatever the locale says; `name` says where it was."""
    try:
        data = text.encode("utf-8", "surrogateescape")  # bytes that the locale has no characters for come as such
    except UnicodeEncodeError as error:
        raise OtaroError(f"{name} is not text: it holds half a character at position {error.start}") from error
    return decode_text(data, name)


def read_prompt(prompt: str | None) -> str:
    """The prompt given, or stdin's text where that is asked for or piped in."""
    if prompt is not None and prompt != "-":
        return given_text(prompt, "the prompt")
    if prompt is None and sys.stdin.isatty():
        raise OtaroError("there is no prompt: give --prompt TEXT or pipe one in")
    return decode_text(sys.stdin.buffer.read(), "the prompt on stdin").rstrip("\n")


def decode_text(data: bytes, name: str) -> str:
    """A text that a person gave, without the mark that some editors begin files with; `name` says where it was."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise OtaroError(f"{name} is not UTF-8 text: the byte at position {error.start} cannot be read") from error


def parse_size(text: str) -> int:
    """A number of bytes such as 500MB, 5GB or 2GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise OtaroError(f"{text!r} is not a size: write it as 500MB or 5GB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))


def check_outputs(paths: Sequence[Path | None]) -> None:
    """Refuse files that could not be written, before anything is measured."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise OtaroError(f"{path} cannot be written: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise OtaroError(f"{path} cannot be written: it is a folder")
