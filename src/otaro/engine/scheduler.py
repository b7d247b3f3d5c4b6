"""Many texts on one engine: those that run take a step together, the others wait in the order they came.

A step is one native call: the next token of every text, and up to `prompt_tokens` tokens of prompts that are still
being read, so that a long prompt does not keep the others waiting. Rows of one width share a reading of the weights,
which is why eight texts take far less time than eight times one. Each text is, on a CPU, the same to the bit as if it
ran alone; docs/gpu.md says how far it is on a GPU.

A prompt that begins like a text that runs, or like one of the last that ended, takes the keys and values of the
beginning from there, if they were computed at the widths that it would use itself.

A thread of the scheduler's own does the running. It is there while there is anything to run, and it calls `on_token`.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy

from otaro.engine.engine import Engine, Overrides
from otaro.engine.native import check
from otaro.engine.numbers import MOST_CONTEXT, token_ids, whole
from otaro.engine.sampling import Sampling, c_sampling
from otaro.engine.session import MOST_TOP, AnySession, Step, Tokens, check_vocabulary
from otaro.errors import OtaroError
from otaro.precision import Precision

WORTH_WAITING = 16
"""Tokens at the beginning of a prompt that another text is about to read."""
MOST_SEQUENCES = 1024
CLOSED = "the scheduler is closed"
GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    precision: Precision | None = None
    """None: the engine's own `precision`, looked up at every token."""
    prefill: Precision | None = None
    """None: as `precision`."""
    overrides: Mapping[str, Precision] | None = None
    end: Sequence[int] = ()
    """Tokens that end the text; they are not given out."""
    logprobs: int | None = None
    """None: none; n: the log-probability of each token and those of the n likeliest ones."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text."""

    id: int
    width: Precision
    """It was run at."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


OnToken = Callable[[Token | None], None]


class Running:
    """A text that waits, runs or has ended. Iterating over it gives its tokens as they come, once."""

    def __init__(self, engine: Engine, request: Request, on_token: OnToken | None) -> None:
        self.request = request
        self.finish_reason: str | None = None
        """None while it waits or runs; "stop" (an end token), "length", "cancelled" or "error"."""
        self.error: Exception | None = None
        self.prompt_reused = 0
        """Tokens of the prompt whose keys and values were taken from another text."""
        self._engine = engine
        self._precision = None if request.precision is None else Precision(request.precision)
        self._on_token = on_token
        self._tokens: SimpleQueue[Token | None] = SimpleQueue()
        self._cancelled = ctypes.c_int32(0)

    @property
    def precision(self) -> Precision | None:
        """The width asked for, None for the engine's own; set, it acts on the next token."""
        return self._precision

    @precision.setter
    def precision(self, precision: Precision | str | None) -> None:
        wanted = None if precision is None else Precision(precision)
        self._engine.check_widths(wanted, None)
        self._precision = wanted

    def cancel(self) -> None:
        """Stop the text, from any thread and even within a native call; returns at once."""
        self._cancelled.value = 1

    def __iter__(self) -> Iterator[Token]:
        while (token := self._tokens.get()) is not None:
            yield token
        self._tokens.put(None)  # for whoever asks again
        if self.error is not None:
            raise self.error

    def _give(self, token: Token | None) -> None:
        self._tokens.put(token)
        if self._on_token is not None:
            self._on_token(token)


class _Text:
    """What the scheduler knows of a text: its tokens, and which widths its keys and values were computed at."""

    def __init__(self, running: Running, prompt: list[int], limit: int) -> None:
        request = running.request
        self.running, self.limit = running, limit
        self.tokens: Tokens = numpy.empty(limit, dtype=numpy.int32)
        self.tokens[: len(prompt)] = prompt
        self.prompt_length, self.known = len(prompt), len(prompt)
        self.sampling = c_sampling(request.sampling)
        self.overrides: Overrides = ()
        self.prefill = None if request.prefill is None else Precision(request.prefill)
        self.end = frozenset(token_ids(request.end))
        self.session: AnySession | None = None
        self.widths: list[tuple[int, bytes]] = []  # up to which position which were used

    @property
    def held(self) -> int:
        return 0 if self.session is None else self.session.length

    def ran(self, widths: bytes) -> None:
        """Take note of the widths that were just used."""
        if self.widths and self.widths[-1][1] == widths:
            self.widths.pop()
        self.widths.append((self.held, widths))

    def shared(self, other: _Text, widths: bytes) -> int:
        """How many tokens of the prompt are held by another text at these widths; one at least is left to run."""
        held = other.widths[0][0] if other.widths and other.widths[0][1] == widths else 0
        return self.alike(other, min(held, other.held))

    def alike(self, other: _Text, most: int) -> int:
        """How many of the first `most` tokens are those of another text; the prompt's last never counts."""
        most = min(most, self.prompt_length - 1)
        differing = numpy.flatnonzero(self.tokens[:most] != other.tokens[:most])
        return int(differing[0]) if len(differing) else most

    def covers(self, other: _Text) -> bool:
        """Whether this text holds all that another one holds."""
        count = other.held
        return (
            self.held >= count
            and len(other.widths) == 1
            and self.widths[0][1] == other.widths[0][1]
            and self.widths[0][0] >= count
            and bool(numpy.array_equal(self.tokens[:count], other.tokens[:count]))
        )


class Scheduler:
    """Runs texts on an engine, `most_sequences` at once; further ones wait in the order they came.

    Prompts are read in pieces of `prompt_tokens`, by default as the device likes them. The keys and values of the
    `kept` texts that ended last are held for prompts that begin alike, and go where memory is short. Switching,
    dropping and raising the precision, loading in the background and the engine's own `tokens` work meanwhile: all take
    turns, a call at a time.
    """

    def __init__(
        self, engine: Engine, *, most_sequences: int = 16, prompt_tokens: int | None = None, kept: int = 4
    ) -> None:
        self.engine = engine
        self._most = whole("most_sequences", most_sequences, 1, MOST_SEQUENCES)
        usual, alone = engine.prompt_pieces
        self._prompt_tokens = whole("prompt_tokens", usual if prompt_tokens is None else prompt_tokens, 1, MOST_CONTEXT)
        self._alone_tokens = max(self._prompt_tokens, alone)
        self._most_kept = whole("kept", kept, 0, MOST_SEQUENCES)
        self._lock = threading.Lock()  # of what follows, up to the next remark
        self._waiting: deque[_Text] = deque()
        self._running: list[_Text] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        self._kept: deque[_Text] = deque()  # the thread's own; the one that ended last comes last

    @property
    def waiting(self) -> int:
        """Texts that have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Texts that are being run."""
        return len(self._running)

    def submit(self, request: Request, on_token: OnToken | None = None) -> Running:
        """Have a text continued; what cannot be run is an error at once.

        `on_token` is called from the scheduler's thread with each token, and once with None when the text has ended; it
        should not take long, for all texts wait for it.
        """
        prompt = token_ids(request.prompt)
        limit = len(prompt) + whole("max_new_tokens", request.max_new_tokens, 1, MOST_CONTEXT)
        self.engine.check_prompt(prompt, limit - len(prompt))
        check_vocabulary(prompt, self.engine.weights.model.shape.vocabulary)
        if request.logprobs is not None:
            whole("logprobs", request.logprobs, 0, min(MOST_TOP, self.engine.weights.model.shape.vocabulary))
        running = Running(self.engine, request, on_token)
        text = _Text(running, prompt, limit)
        text.overrides = self.engine.check_widths(running.precision, request.overrides)
        self.engine.check_widths(text.prefill, None)
        with self._lock:
            if self._closed:
                raise OtaroError(CLOSED)
            self._waiting.append(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="otaro-scheduler", daemon=True)
                self._thread.start()
        return running

    def close(self, wait: bool = False) -> None:
        """Take no further texts and end those that are there: at once, or with `wait` when they are finished."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if not wait:
                for text in (*self._waiting, *self._running):
                    text.running.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if thread is None:
            self._kept.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                while self._waiting and len(self._running) < self._most:
                    self._running.append(self._waiting.popleft())
                abandoned = [text for text in self._waiting if text.running._cancelled.value]
                if not self._running:
                    self._thread = None
                    if self._closed:
                        self._kept.clear()
                    return
            for text in abandoned:
                self._end(text, "cancelled")
            try:
                self._step()
            except Exception as error:  # of any kind: whoever waits for a text must hear of it
                if self._kept:  # memory may have run out: what they held may be enough
                    self._kept.clear()
                    continue
                for text in list(self._running):
                    self._end(text, "error", error)

    def _step(self) -> None:
        """The next token of every text, and pieces of prompts."""
        for text in list(self._running):
            if text.running._cancelled.value:
                self._end(text, "cancelled")
        reading = [text for text in self._running if text.held < text.prompt_length]
        room = self._prompt_tokens if len(reading) < len(self._running) else self._alone_tokens
        for text in reading:
            self._begin(text)
        steps: list[tuple[_Text, Step, Precision]] = []
        chosen: dict[tuple[Precision | None, Overrides], tuple[Precision, bytes]] = {}
        with self.engine.running:
            for text in list(self._running):
                precision, left = text.running.precision, text.prompt_length - text.held
                if left > 0:
                    if room == 0:
                        continue
                    precision = text.prefill or precision
                key = (precision, text.overrides)
                if key not in chosen:
                    chosen[key] = self.engine.widths_now(*key)
                used, widths = chosen[key]
                if left > 0 and text.held == 0:
                    self._reuse(text, widths)
                    left = text.prompt_length - text.held
                    if any(self._is_reading(other, step, text) for other, step, _ in steps if step.widths == widths):
                        continue
                count = min(left, room) if left > 0 else 1
                room -= count if left > 0 else 0
                steps.append((text, self._step_of(text, count, widths), used))
                self.engine.used = used
            if steps:
                self.engine.run_steps([step for _, step, _ in steps])
        for text, step, used in steps:
            self._take(text, step, used)

    def _begin(self, text: _Text) -> None:
        """Make room for a text's keys and values."""
        if text.session is not None:
            return
        try:
            text.session = self.engine.new_session(text.limit)
        except OtaroError as error:
            if not self._kept:
                self._end(text, "error", error)
                return
            self._kept.clear()
            self._begin(text)

    def _reuse(self, text: _Text, widths: bytes) -> None:
        """Copy the beginning of a prompt from the text that holds most of it."""
        others = [(text.shared(other, widths), other) for other in (*self._running, *self._kept) if other is not text]
        shared, other = max(others, key=lambda pair: pair[0], default=(0, text))
        if shared == 0:
            return
        assert text.session is not None
        assert other.session is not None
        text.session.copy(other.session, shared)
        if other in self._kept:  # the one used last goes last
            self._kept.remove(other)
            self._kept.append(other)
        text.ran(widths)
        text.running.prompt_reused = shared

    def _is_reading(self, other: _Text, step: Step, text: _Text) -> bool:
        """Whether a step reads what a text that has not begun would read too, so that it had better wait for it."""
        if step.position >= other.prompt_length:
            return False
        return text.alike(other, other.prompt_length) - max(text.held, step.position) >= WORTH_WAITING

    def _step_of(self, text: _Text, count: int, widths: bytes) -> Step:
        assert text.session is not None
        start = text.session.length
        return Step(
            text.session,
            text.tokens[start : start + count],
            start,
            widths,
            rows=1 if start + count >= text.prompt_length else 0,
            sampling=text.sampling,
            top=text.running.request.logprobs,
            cancel=text.running._cancelled,
        )

    def _take(self, text: _Text, step: Step, used: Precision) -> None:
        """What came of a step."""
        if step.cancelled:
            self._end(text, "cancelled")
            return
        if step.failed:
            try:
                check(step.failed)
            except Exception as error:
                self._end(text, "error", error)
            return
        text.ran(step.widths)
        if not step.picked:
            return
        token = step.picked[0]
        if token in text.end:
            self._end(text, "stop")
            return
        text.tokens[text.known] = token
        text.known += 1
        odds = () if step.top is None else (step.logprobs[0], tuple(step.tops[0]))
        try:
            text.running._give(Token(token, used, *odds))
        except Exception as error:
            self._end(text, "error", error)
            return
        if text.known == text.limit:
            self._end(text, "length")

    def _end(self, text: _Text, reason: str, error: Exception | None = None) -> None:
        with self._lock:
            for texts in (self._waiting, self._running):
                if text in texts:
                    texts.remove(text)
        if text.held and error is None:
            self._keep(text)
        text.running.finish_reason, text.running.error = reason, error
        try:
            text.running._give(None)
        except Exception as failure:
            text.running.error = text.running.error or failure

    def _keep(self, text: _Text) -> None:
        """Hold a text that has ended for prompts that begin like it, and let those go that it begins with."""
        self._kept = deque(other for other in self._kept if not text.covers(other))
        self._kept.append(text)
        while len(self._kept) > self._most_kept:
            self._kept.popleft()
