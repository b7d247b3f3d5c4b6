"""What running a packed model takes, counted before it is loaded, and the widest width that a limit has room for.

    runtime    Python and its libraries, tokenizer included, as the system counts them beforehand, and what loading
               them took for a moment, as far as the rest does not take it again
    weights    the planes of the widths that are loaded, as the engine lays them out, and norms and biases
    cache      keys and values, once the context is full
    work       all else that the engine takes, what Python still allocates while a text runs, and while weights are
               loaded the tensors being read, which are gone before the cache grows

All of it together is the most that the process takes.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from otaro.checkpoint.folder import PackedFolder
from otaro.checkpoint.layout import Entry, parts
from otaro.engine.architecture import read_shape
from otaro.engine.native import Model, free_heap
from otaro.engine.session import session_size
from otaro.engine.weights import packed_size, read_config
from otaro.errors import OtaroError
from otaro.precision import NARROWEST, Precision

RESERVE = 16 << 20
"""Bytes that Python, its allocator and threads come to take after the count: about 5 MB for a text of 1000 tokens."""
FLOAT = 4


@dataclass(frozen=True)
class Budget:
    """A width and a context, and the bytes that they take."""

    loaded: Precision
    """The widest width that is."""
    context: int
    runtime: int
    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        return self.runtime + self.weights + self.cache + self.work

    def __str__(self) -> str:
        """Without a size in it: ``E5M4 and 1024 tokens: …``."""
        named = {
            "Python and its libraries": self.runtime,
            "weights": self.weights,
            "keys and values": self.cache,
            "to work with": self.work,
        }
        listed = ", ".join(f"{_megabytes(size)} {name}" for name, size in named.items())
        return f"{self.loaded} and {self.context} tokens take {math.ceil(self.total / 1e6)} MB: {listed}"


class Estimate:
    """Counts for one folder, number of threads and kind of cache."""

    def __init__(
        self, folder: Path, *, threads: int, cache: Precision | None = None, progressive: bool = False
    ) -> None:
        self.folder = PackedFolder(folder)
        config = read_config(self.folder)
        self.longest: int = config.max_position_embeddings
        self._model = Model(read_shape(self.folder, config))
        self._threads, self._cache, self._progressive = threads, cache, progressive
        self._now = self._peak = 0

    def of(self, precision: Precision, context: int) -> Budget:
        """What a width and a context take."""
        format = self.folder.format
        cache, work = session_size(self._model, format, context, cache=self._cache, threads=self._threads)
        plain = sum(FLOAT * math.prod(entry.shape) for entry in self.folder.entries if entry.floor is None)
        loading = max(self._parts(entry) for entry in self.folder.entries)
        # Weights that come while a text runs need room beside it; otherwise they have that of the cache to come.
        extra = loading if self._progressive else max(0, loading - cache - work)
        weights, work = packed_size(self.folder, precision) + plain, work + extra + RESERVE
        runtime = max(self._now, self._peak - weights - cache - work)
        return Budget(precision, context, runtime, weights, cache, work)

    def _parts(self, entry: Entry) -> int:
        """Bytes of a tensor that are read before the engine takes it over: planes above the first come one by one."""
        return sum(part.nbytes for width, part in parts(entry, self.folder.format) if width == NARROWEST)

    def fit(
        self,
        limit: int,
        *,
        exactly: Precision | None = None,
        at_least: Precision | None = None,
        wanted: int,
        fewest: int,
        most: int,
    ) -> Budget:
        """The widest width, or `exactly` one, that `limit` bytes have room for with a context of `wanted` tokens.

        Where no width has room for so many tokens it is the narrowest, with as many as there is room for, from `fewest`
        on; where there is room for more they are as many, up to `most`.
        """
        free_heap()
        self._now, self._peak = resident(), peak()
        least = exactly or at_least or self.folder.precisions[-1]
        self.folder.check_available(least)
        widths = [width for width in self.folder.precisions if width >= least and exactly in (None, width)]
        fitting = next((width for width in widths if self.of(width, wanted).total <= limit), None)
        if fitting is None and self.of(least, fewest).total > limit:
            raise self._refusal(limit, least, fewest)
        low, high = (fewest, wanted) if fitting is None else (wanted, max(wanted, most))
        width = fitting or least
        return self.of(width, last(low, high, lambda context: self.of(width, context).total <= limit))

    def _refusal(self, limit: int, precision: Precision, context: int) -> OtaroError:
        said = f"{_megabytes(limit)} MB are too little: {self.of(precision, context)}"
        fitting = [width for width in self.folder.precisions if self.of(width, context).total <= limit]
        return OtaroError(f"{said}; {fitting[0]} is the widest that fits" if fitting else said)


def last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `high` for which something holds that holds for `low` and ends at some point."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def resident() -> int:
    """Bytes of memory that this process and those it started take now, as the system counts them.

    Where it does not tell, the most that this process ever took.
    """
    try:
        tasks = Path("/proc/self/task").glob("*/children")
        children = [child for task in tasks for child in task.read_text(encoding="ascii").split()]
        return sum(_status(process, "VmRSS") for process in ["self", *children])
    except OSError:
        return peak()


def peak() -> int:
    """The most bytes of memory that this process took so far."""
    try:
        return _status("self", "VmHWM")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(process: str, field: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f}" if size >= 1e7 else f"{size / 1e6:.1f}"
