"""How the command line talks: results on stdout, everything else on stderr.

So `otaro generate ... | less` and `otaro eval --json - | jq` see the result alone.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from otaro.errors import OtaroError

if TYPE_CHECKING:
    from otaro.checkpoint.folder import Progress as ProgressCallback

SECONDS_BETWEEN_LINES = 10.0


def results() -> Console:
    """Where results go. Made on each call, because tests and callers swap sys.stdout."""
    return Console(soft_wrap=False, highlight=False)


def notes() -> Console:
    """Where progress, remarks and errors go."""
    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """One remark in one line, whatever its length."""
    notes().print(escape(text), soft_wrap=True)


def mark(text: str) -> None:
    """A short remark within a line of streamed text."""
    notes().print(escape(text), end="", style="dim")


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
            bar.update(task, description=escape(description), completed=done, total=total)

        yield update


def _lines(console: Console) -> ProgressCallback:
    last = time.monotonic()

    def update(description: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES and done < total:
            last = time.monotonic()
            console.print(escape(f"{description}: {done / total:.0%}"), soft_wrap=True)

    return update


def size_text(size: int) -> str:
    """A number of bytes for people, in the decimal units disks are sold in."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} bytes"


def stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def read_prompt(prompt: str | None) -> str:
    """The prompt given, or stdin's text where that is asked for or piped in."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise OtaroError("there is no prompt: give --prompt TEXT or pipe one in")
    return decode_text(sys.stdin.buffer.read(), "the prompt on stdin").rstrip("\n")


def decode_text(data: bytes, name: str) -> str:
    """A text that a person gave; `name` says where it was."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OtaroError(f"{name} is not UTF-8 text: the byte at position {error.start} cannot be read") from error


def parse_size(text: str) -> int:
    """A number of bytes such as 500MB, 5GB or 2GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise OtaroError(f"{text!r} is not a size: write it as 500MB or 5GB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


def check_outputs(paths: Sequence[Path | None]) -> None:
    """Refuse files that could not be written, before anything is measured."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise OtaroError(f"{path} cannot be written: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise OtaroError(f"{path} cannot be written: it is a folder")
