"""How the command line talks: results on stdout, everything else on stderr.

So `otaro generate ... | less` and `otaro eval --json - | jq` see the result alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
