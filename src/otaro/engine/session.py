"""Texts in memory, and the work that runs many of them at once.

A `Session` holds the keys and values of one text and grows with it. A `Work` holds all else that running takes and
serves any number of sessions: `Step`s of several texts go through the model together, rows of one width sharing a
reading of the weights, and each text is the same to the bit as if it ran alone. `AnySession` and `AnyWork` are what the
engine knows of either: there are others on GPUs.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from otaro.engine.native import CANCELLED, Logits, Model, check, create, library
from otaro.engine.numbers import MOST_CONTEXT, shown, token_ids, whole
from otaro.engine.sampling import CSampling
from otaro.engine.shape import AnyModel
from otaro.errors import OtaroError
from otaro.ops import cpu
from otaro.precision import Precision
from otaro.sefp import Format

NOT_LOADED = "that precision is not loaded: raise the model to it first"
MOST_TOP = 1024
"""Likeliest tokens that can be asked for, as the native library has it."""

Tokens = NDArray[numpy.int32]


class _Entry(ctypes.Structure):
    _fields_ = (
        ("session", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tokens_bytes", "count", "position")),
        ("mantissa", ctypes.c_char_p),
        ("mantissa_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("logits_bytes", ctypes.c_int64),
        ("sampling", ctypes.c_void_p),
        ("picked", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("picked_bytes", "picked_count", "top")),
        ("logprobs", ctypes.c_void_p),
        ("logprobs_bytes", ctypes.c_int64),
        ("top_tokens", ctypes.c_void_p),
        ("top_tokens_bytes", ctypes.c_int64),
        ("cancel", ctypes.c_void_p),
        ("result", ctypes.c_int32),
    )


class AnySession(ABC):
    """Keys and values of one text, wherever they are."""

    def __init__(self, model: AnyModel, context: int) -> None:
        self.context = whole("context", context, 1, MOST_CONTEXT)
        self.length = 0
        """Tokens whose keys and values are held."""
        self.shape = model.shape
        self._longest = 0  # of the texts since memory was last given back

    @property
    @abstractmethod
    def nbytes(self) -> tuple[int, int]:
        """Bytes that keys and values take now, and that they take once the context is full."""

    @abstractmethod
    def _release(self, length: int) -> None:
        """Give back the memory beyond so many tokens."""

    @abstractmethod
    def _copy(self, other: Any, length: int) -> None:
        """Take over the first tokens of another session."""

    def expect(self, length: int) -> None:
        """Give memory back if the text at hand will be no longer than this, and one before it was twice as long.

        Where texts are of about one size it is kept for the next one.
        """
        if 2 * length <= self._longest:
            self._release(length)
            self.length, self._longest = min(self.length, length), length

    def copy(self, other: AnySession, length: int) -> None:
        """Become the text of the first `length` tokens of another session of the same model and kind of cache."""
        self._copy(other, length)
        self.length, self._longest = length, max(self._longest, length)

    def ran(self, length: int) -> None:
        """Take note of how many tokens are held after a run."""
        self.length, self._longest = length, max(self._longest, length)

    def checked(self, tokens: Sequence[int], position: int, count: int) -> list[int]:
        """The tokens, if they are of the vocabulary and `count` of them have room at the position."""
        ids = token_ids(tokens)
        whole("the position", position, 0, self.context)
        if position + count > self.context:
            raise OtaroError(f"{position + count} tokens do not fit the context of {self.context}: shorten the text")
        check_vocabulary(ids, self.shape.vocabulary)
        if position > self.length:
            raise ValueError(f"position {position} leaves a gap: {self.length} tokens are held")
        return ids


class Session(AnySession):
    """Keys and values of one text in native memory, kept as float16, or as SEFP codes of the width `cache`."""

    def __init__(self, model: Model, context: int, *, cache: Precision | None = None) -> None:
        super().__init__(model, context)
        self.model = model
        self.handle = create(self, "otaro_session", model.handle, context, 0 if cache is None else cache.mantissa)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that keys and values take now, and that they take once the context is full."""
        sizes = [ctypes.c_int64() for _ in range(2)]
        check(library().otaro_session_bytes(self.handle, *map(ctypes.byref, sizes)))
        return sizes[0].value, sizes[1].value

    def _release(self, length: int) -> None:
        check(library().otaro_session_release(self.handle, length))

    def _copy(self, other: Session, length: int) -> None:
        check(library().otaro_session_copy(self.handle, other.handle, length))


@dataclass(eq=False)
class Step:
    """Tokens of one text to run from a position on, forgetting what lay there and behind.

    `widths` holds the mantissa bits of the embedding, of each layer and of the head. Of the last `rows` tokens the
    logits are computed: with `sampling` a token is picked from each, up to the first that is not the token run after
    it, and what was run behind that is forgotten; without it they are given out.
    """

    session: Any
    """Of the kind that the work which runs it has."""
    tokens: Tokens
    position: int
    widths: bytes
    rows: int = 1
    sampling: CSampling | None = None
    top: int | None = None
    """Likeliest tokens whose log-probabilities are wanted, beside that of the token picked; None: none at all."""
    cancel: ctypes.c_int32 | None = None
    """Where another thread sets it to other than 0 the text is left out of the rest of the run."""

    picked: list[int] = field(default_factory=list, init=False)
    logprobs: list[float] = field(default_factory=list, init=False)
    tops: list[list[tuple[int, float]]] = field(default_factory=list, init=False)
    logits: Logits | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)
    failed: int = field(default=0, init=False)
    """The code of what was wrong with this text alone; `native.check` makes an error of it."""


class AnyWork(Protocol):
    """Runs texts on whatever device, as `Work` does."""

    prefill_tokens: int
    """Prompt tokens that the engine runs between two looks at whether to stop."""
    prompt_tokens: int
    """Prompt tokens in a step in which texts wait for their next token."""
    alone_tokens: int
    """Prompt tokens in a step in which none does."""
    scored_tokens: int
    """Tokens whose logits are held at a time where a text is scored; others have their turn in between."""

    @property
    def nbytes(self) -> int: ...

    def run(self, steps: Sequence[Step], *, threads: int) -> None: ...

    def logits(
        self, session: Any, tokens: Sequence[int], position: int, widths: bytes, *, threads: int, rows: int = 1
    ) -> Logits: ...

    def draft(
        self,
        session: Any,
        token: int,
        position: int,
        widths: bytes,
        *,
        most: int,
        rows: int,
        margin: float,
        threads: int,
    ) -> list[int]: ...


class Work:
    """What running a model takes besides keys and values. One call at a time.

    With `fine` every product takes its activations in 16 bits, for measuring.
    """

    prefill_tokens, prompt_tokens, alone_tokens, scored_tokens = 256, 64, 128, 32

    def __init__(self, model: Model, *, fine: bool = False, isa: str | None = None) -> None:
        self._model = model
        self.handle = create(self, "otaro_work", model.handle, cpu.isa_number(isa))
        check(library().otaro_work_set_fine(self.handle, fine))

    @property
    def nbytes(self) -> int:
        value = ctypes.c_int64()
        check(library().otaro_work_bytes(self.handle, ctypes.byref(value)))
        return value.value

    def run(self, steps: Sequence[Step], *, threads: int) -> None:
        """Run all of them at once; what came of each is in it afterwards."""
        entries = (_Entry * len(steps))()
        held = [self._enter(step, entry) for step, entry in zip(steps, entries, strict=True)]
        for step in steps:
            step.session.length = min(step.session.length, step.position)
        check(library().otaro_run(self.handle, entries, ctypes.sizeof(entries), len(steps), threads), NOT_LOADED)
        for step, entry, (picked, logprobs, tops) in zip(steps, entries, held, strict=True):
            step.cancelled = entry.result == CANCELLED
            step.failed = 0 if step.cancelled else entry.result
            if entry.result:
                continue
            count = entry.picked_count
            # Those picked but the last are the tokens run behind the first row.
            behind = step.rows - count if step.sampling is not None and step.rows else 0
            step.session.ran(step.position + len(step.tokens) - behind)
            if picked is not None:
                step.picked = picked[:count]
            if step.top is not None and logprobs is not None and tops is not None:
                size = 1 + step.top
                step.logprobs = logprobs[: count * size : size]
                step.tops = [
                    list(zip(tops[row * step.top :][: step.top], logprobs[row * size + 1 :][: step.top], strict=True))
                    for row in range(count)
                ]

    def _enter(self, step: Step, entry: _Entry) -> tuple[ctypes.Array[ctypes.c_int32] | None, Any, Any]:
        """Fill in an entry; the memory that results go to."""
        tokens = step.tokens
        entry.session = step.session.handle
        entry.tokens, entry.tokens_bytes, entry.count = tokens.ctypes.data, tokens.nbytes, len(tokens)
        entry.position, entry.rows, entry.top = step.position, step.rows, -1
        entry.mantissa, entry.mantissa_bytes = step.widths, len(step.widths)
        if step.cancel is not None:
            entry.cancel = ctypes.addressof(step.cancel)
        if step.rows == 0:
            return None, None, None
        if step.sampling is None:
            step.logits = numpy.empty((step.rows, self._model.shape.vocabulary), dtype=numpy.float32)
            entry.logits, entry.logits_bytes = step.logits.ctypes.data, step.logits.nbytes
            return None, None, None
        picked = (ctypes.c_int32 * step.rows)()
        entry.sampling = ctypes.addressof(step.sampling)
        entry.picked, entry.picked_bytes = ctypes.addressof(picked), ctypes.sizeof(picked)
        if step.top is None:
            return picked, None, None
        logprobs, tops = (ctypes.c_float * (step.rows * (1 + step.top)))(), (ctypes.c_int32 * (step.rows * step.top))()
        entry.top = step.top
        entry.logprobs, entry.logprobs_bytes = ctypes.addressof(logprobs), ctypes.sizeof(logprobs)
        entry.top_tokens, entry.top_tokens_bytes = ctypes.addressof(tops), ctypes.sizeof(tops)
        return picked, logprobs, tops

    def logits(
        self, session: Session, tokens: Sequence[int], position: int, widths: bytes, *, threads: int, rows: int = 1
    ) -> Logits:
        """Run tokens of one text; the last rows of logits."""
        ids = session.checked(tokens, position, len(tokens))
        count = whole("the number of logits", rows, 0, len(ids))
        step = Step(session, numpy.array(ids, dtype=numpy.int32), position, widths, count)
        self.run([step], threads=threads)
        empty = numpy.empty((0, self._model.shape.vocabulary), dtype=numpy.float32)
        return empty if step.logits is None else step.logits

    def draft(
        self,
        session: Session,
        token: int,
        position: int,
        widths: bytes,
        *,
        most: int,
        rows: int,
        margin: float,
        threads: int,
    ) -> list[int]:
        """Guess up to `most` tokens after a token, each the likeliest of the first `rows` of the vocabulary.

        The guessing ends with a token that is ahead of the next likeliest by less than `margin`. What lay at the
        position and behind is forgotten.
        """
        whole("the number of drafts", most, 1, MOST_CONTEXT)
        session.checked([token], position, most)
        drafts = (ctypes.c_int32 * most)()
        count = ctypes.c_int64(most)
        session.length = min(session.length, position)
        error = library().otaro_draft(
            *(self.handle, session.handle, token, position, widths, len(widths), rows, margin),
            *(drafts, ctypes.sizeof(drafts), ctypes.byref(count), threads),
        )
        check(error, NOT_LOADED)
        return drafts[: count.value]


def check_vocabulary(tokens: Sequence[int], vocabulary: int) -> None:
    """An error if one of the tokens is none of the model's."""
    outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise OtaroError(f"token {shown(outside)} is outside the vocabulary of {vocabulary}: use the model's tokenizer")


def session_size(
    model: Model, format: Format, context: int, *, cache: Precision | None = None, threads: int
) -> tuple[int, int]:
    """Bytes that a session takes once its context is full, and that running it takes besides.

    The model may be without its matrices.
    """
    sizes = [ctypes.c_int64() for _ in range(2)]
    width = 0 if cache is None else cache.mantissa
    arguments = (model.handle, format.group_size, context, width, threads)
    check(library().otaro_size(*arguments, *map(ctypes.byref, sizes)))
    return sizes[0].value, sizes[1].value
