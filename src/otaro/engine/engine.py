"""Tokens in, tokens out: a packed model run natively, at a precision that may change between two tokens.

One copy of the weights serves every width, so a switch is the choice of how many planes to read, made anew for each
token. The keys and values of tokens stay as they were computed. Results do not depend on the number of threads nor on
what is run together, so a text continued token by token, beside others or by speculation is the same to the bit.
An engine continues one text at a time; `scheduler` runs many on the same weights.

Speculation guesses a few tokens and lets the wanted width run all of them in one reading of the weights, which takes
little longer than running one. Tokens are picked from its logits one after another as ever, until one differs from the
guess behind which it stands. So the text, greedy or drawn with a seed, is exactly that of the wanted width alone.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy

from otaro.engine.live import FairLock, LiveWeights
from otaro.engine.native import Logits, check
from otaro.engine.numbers import MOST_CONTEXT, MOST_THREADS, shown, token_ids, whole
from otaro.engine.sampling import CSampling, Sampling, c_sampling
from otaro.engine.session import AnySession, AnyWork, Session, Step, Work
from otaro.engine.speculation import (
    MARGIN,
    MOST_DRAFTS,
    MOST_GUESSES,
    VOCABULARY_PART,
    Counts,
    Repetition,
    Rests,
)
from otaro.engine.text import generate as generate_text
from otaro.engine.weights import AnyWeights, Weights
from otaro.errors import FormatError, OtaroError, PrecisionError
from otaro.precision import NARROWEST, Precision, join
from otaro.progress import Progress
from otaro.text import NO_TOKENS, GenerationResult, check_room, prompt_tokens
from otaro.tokenizer import load_tokenizer, render_chat

DEFAULT_CONTEXT = 8192
CPU = "cpu"
FLOAT16 = "float16"
MOST_WIDTHS = 256
"""Choices of widths that are remembered."""


class TextSettings(TypedDict, total=False):
    """How a text goes on, for `Engine.generate` and `Engine.chat`; what is left out is as in `Engine.tokens`."""

    max_new_tokens: int | None
    """256 if left out, or as many as the context has room for."""
    sampling: Sampling
    prefill: Precision | str | None
    overrides: Mapping[str, Precision | str] | None
    draft: Precision | str | None
    stop: str | Sequence[str]
    """The answer ends before any of these."""
    reuse: bool
    on_text: Callable[[str], None] | None
    on_width: Callable[[Precision], None] | None
    """Gets the width before the first token, and whenever another one is in use."""


Overrides = tuple[tuple[str, Precision], ...]
"""Patterns of layers and their widths."""
Widths = bytes | Callable[[], bytes]
"""The width of each part of a model, as `Weights.widths` gives it, or how to find it when tokens are run."""


def usable_cores() -> int:
    """The cores this process may use, where the system says; all of them elsewhere."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


class Engine:
    """A packed folder ready to run. `precision` is the width asked for; set it at any time, even between two tokens.

    With `progressive` it is ready as soon as the narrowest width is in; wider planes join in the background, and
    `width`, the one in use, rises with them up to `precision`, or to what that is set to meanwhile.

    `context` is how many tokens a text may have, at most the model's own limit. One text runs at a time: a second
    caller waits until the first one's iterator has ended or is closed. Precision and planes may change meanwhile, and
    a `Scheduler` may run others: its calls and those of this text then take turns.

    Keys and values are kept as float16, or with `kv_cache` a precision, as SEFP codes of that width.

    `device` is "cpu", the native engine, "cuda", an NVIDIA GPU (`otaro.engine.cuda`), or "auto", a GPU where there is
    one; `threads` count on a CPU.
    """

    def __init__(
        self,
        folder: str | Path,
        precision: Precision | str | None = None,
        *,
        context: int | None = None,
        threads: int | None = None,
        kv_cache: Precision | str = FLOAT16,
        progressive: bool = False,
        device: str = CPU,
        progress: Progress | None = None,
    ) -> None:
        self.threads = usable_cores() if threads is None else whole("threads", threads, 1, MOST_THREADS)
        self.kv_cache = parse_cache(kv_cache)
        """The width of keys and values; None is float16."""
        chosen = None if precision is None else Precision(precision)
        first = NARROWEST if progressive else chosen
        self.device = device
        """Where it runs: "cpu" or "cuda"."""
        if device != CPU:
            from otaro.engine.cuda.launches import choose

            self.device = choose(device)
        self.weights, self._work, self._new_session = self._open(Path(folder), first, progress)
        limit = self.weights.config.max_position_embeddings
        if type(limit) is not int or limit < 1:
            raise FormatError(f"{folder}/config.json allows {limit} positions: fetch it again")
        if context is not None and whole("context", context, 1, MOST_CONTEXT) > limit:
            raise OtaroError(f"a context of {context} tokens is not possible: the model's own is {limit}")
        self.context = int(context or min(limit, DEFAULT_CONTEXT))
        self._live = LiveWeights(self.weights)
        self._sessions: weakref.WeakSet[AnySession] = weakref.WeakSet()
        self._session = self.new_session(self.context)
        self._chosen: dict[tuple[Precision, Overrides], bytes] = {}
        self._held: list[int] = []
        self._text = threading.Lock()  # held while a text is run, between its tokens too
        self._text_thread: int | None = None
        self.used = self.weights.loaded
        """The width that the latest tokens were run at."""
        # When the engine goes, and before the interpreter does: a thread must not outlive what it changes.
        self._closed = weakref.finalize(self, self._live.close)
        self.speculation = Counts()
        """How speculation went in the text at hand."""
        if progressive:
            self._live.load_in_background(chosen or self.weights.folder.precisions[0])

    def _open(
        self, folder: Path, precision: Precision | None, progress: Progress | None
    ) -> tuple[AnyWeights, AnyWork, Callable[[int, Precision | None], AnySession]]:
        """Weights, the work on them (used by whoever holds `running`), and what makes room for texts."""
        if self.device != CPU:
            from otaro.engine.cuda import open_device

            return open_device(folder, precision, self.device, progress)
        weights = Weights(folder, precision, threads=self.threads, progress=progress)
        return weights, Work(weights.model), lambda context, cache: Session(weights.model, context, cache=cache)

    @property
    def precision(self) -> Precision:
        return self._live.precision

    @precision.setter
    def precision(self, precision: Precision | str) -> None:
        self._live.precision = Precision(precision)

    @property
    def width(self) -> Precision:
        """The width in use: `precision`, or the widest that is there by now."""
        return self._live.width

    @property
    def limit(self) -> Precision:
        """The widest precision that can be asked for: in memory, or on its way there."""
        return self._live.limit

    def drop_to(self, precision: Precision | str) -> None:
        """Free the planes above a width, and stop loading them; `precision` follows if it was above."""
        self._live.drop_to(Precision(precision))

    def raise_to(self, precision: Precision | str) -> None:
        """Read the planes up to a width from the folder again and use it."""
        self._live.raise_to(Precision(precision))

    def finish_loading(self) -> None:
        """Wait until all planes have joined; an error if some could not be read."""
        self._live.finish_loading()

    def check_loading(self) -> None:
        """An error, once, if planes could not be read in the background; what had joined by then stays."""
        self._live.check_loading()

    def close(self) -> None:
        """Stop loading in the background."""
        self._closed()

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of memory: `weights`, `cache` (keys and values of the text so far), `work`; and `full_cache`.

        The cache grows with the text and reaches `full_cache` when the context is full; the texts of a scheduler count
        as well. What Python and its libraries take besides is not in here.
        """
        with self.running:
            sizes = [session.nbytes for session in list(self._sessions)]
            weights, work = self.weights.nbytes, self._work.nbytes
        cache, full_cache = (sum(size) for size in zip(*sizes, strict=True))
        return {"weights": weights, "cache": cache, "full_cache": full_cache, "work": work}

    @property
    def running(self) -> FairLock:
        """To be held while widths are looked up and texts are run at them; planes come and go in between."""
        return self._live.running

    def run_steps(self, steps: Sequence[Step]) -> None:
        """Run steps of several texts at once; hold `running`."""
        self._work.run(steps, threads=self.threads)

    @property
    def prompt_pieces(self) -> tuple[int, int]:
        """Prompt tokens in a step of several texts: where some wait for their next token, and where none does."""
        return self._work.prompt_tokens, self._work.alone_tokens

    def new_session(self, context: int) -> AnySession:
        """Room for the keys and values of one more text."""
        session = self._new_session(context, self.kv_cache)
        with self.running:  # `memory` goes through them
            self._sessions.add(session)
        return session

    def for_scoring(self, context: int) -> tuple[AnyWork, AnySession]:
        """To measure with: activations of 16 bits in every product, keys and values as they are."""
        if isinstance(self.weights, Weights):
            return Work(self.weights.model, fine=True), self._new_session(context, None)
        return self._work, self._new_session(context, None)

    def logits(self, tokens: Sequence[int], precision: Precision | str | None = None) -> Logits:
        """The logits after each token of a text, [tokens, vocabulary]."""
        ids = token_ids(tokens)
        self.check_prompt(ids, 0)
        with self._turn():
            self._held = []
            self._session.expect(len(ids))
            return self.run(ids, 0, self._widths(precision), logits=len(ids))

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, loaded from the folder when it is first asked for."""
        return load_tokenizer(self.weights.folder.path)

    def generate(self, prompt: str, *, raw: bool = False, **settings: Unpack[TextSettings]) -> GenerationResult:
        """An answer to a text, which goes through the model's chat template if it has one.

        With `raw` the text goes on as it stands. `on_text` is called with each piece of the answer as soon as it is
        settled; the other settings are in `TextSettings`.
        """
        if not isinstance(prompt, str):
            raise OtaroError(f"the prompt is {shown(prompt)}, not text: use tokens for the ids of tokens")
        ids = prompt_tokens(self.tokenizer, prompt, raw=raw)
        return generate_text(self, self.tokenizer, ids, **settings)

    def chat(self, messages: Sequence[Mapping[str, Any]], **settings: Unpack[TextSettings]) -> GenerationResult:
        """The next answer in a conversation, ``[{"role": "user", "content": "…"}]``, the latest message last.

        With `reuse` only what is new in it is run, where the conversation before was the engine's latest text.
        """
        listed = isinstance(messages, Sequence) and all(isinstance(entry, Mapping) for entry in messages)
        if not listed or not messages:
            raise OtaroError('messages are a list such as [{"role": "user", "content": "…"}]; use generate for a text')
        return generate_text(self, self.tokenizer, render_chat(self.tokenizer, messages), **settings)

    def tokens(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        prefill: Precision | str | None = None,
        overrides: Mapping[str, Precision | str] | None = None,
        draft: Precision | str | None = None,
        end: Sequence[int] = (),
        reuse: bool = False,
    ) -> Generator[int, None, None]:
        """Continue a prompt, token by token, until one of `end` (not given out) or the limit.

        The prompt is read at `prefill`, new tokens are run at `precision`, whatever it is set to by then. `overrides`
        gives single layers other widths, as in `Weights.widths`. With `draft` that width drafts and `precision` checks.
        With `reuse`, what the prompt shares with the text before is not run again. Closing the iterator stops.
        """
        text = token_ids(prompt)
        self.check_prompt(text, whole("max_new_tokens", max_new_tokens, 1, MOST_CONTEXT))
        wanted, reading = self._widths(None, overrides), self._widths(prefill, overrides)
        drafting = None if draft is None else self._widths(draft)
        ends = frozenset(token_ids(end))
        drawn = c_sampling(sampling)
        return self._tokens(text, int(max_new_tokens), drawn, wanted, reading, drafting, ends, reuse)

    def _tokens(
        self,
        text: list[int],
        max_new_tokens: int,
        sampling: CSampling,
        widths: Widths,
        prefill: Widths,
        draft: Widths | None,
        end: frozenset[int],
        reuse: bool,
    ) -> Generator[int, None, None]:
        with self._turn():
            limit = len(text) + max_new_tokens
            self._session.expect(limit)
            fresh = self._prefill(text, sampling, prefill, reuse)
            guessing, self.speculation = (Repetition(), Rests()), Counts()
            while True:
                for token in fresh:
                    if token in end:
                        return
                    text.append(token)
                    yield token
                    self._text_thread = threading.get_ident()  # whoever goes on with the text now
                    if len(text) == limit:
                        return
                room = limit - len(text) - 1
                if draft is None or room < 1:
                    fresh = self._pick(text[-1:], len(text) - 1, widths, sampling)
                else:
                    fresh = self._speculate(text, sampling, widths, draft, guessing, room)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One text at a time: others wait, but the thread that runs it would wait for itself."""
        if not self._text.acquire(blocking=self._text_thread != threading.get_ident()):
            raise OtaroError("a text is still being run in this thread: close its iterator before the next one")
        try:
            self._text_thread = threading.get_ident()
            yield
        finally:
            self._text_thread = None
            self._text.release()

    def _prefill(self, text: list[int], sampling: CSampling, widths: Widths, reuse: bool) -> list[int]:
        """Run all of a prompt that is not held already; the token after it."""
        done = 0
        if reuse:
            shared = min(len(text) - 1, len(self._held), self._session.length)
            done = next((i for i in range(shared) if text[i] != self._held[i]), shared)
        self._held = text  # the list itself: it grows as the text does
        piece = self._work.prefill_tokens
        while len(text) - done > piece:
            self.run(text[done : done + piece], done, widths, logits=0)
            done += piece
        return self._pick(text[done:], done, widths, sampling, rows=1)

    def _pick(
        self, tokens: Sequence[int], position: int, widths: Widths, sampling: CSampling, rows: int | None = None
    ) -> list[int]:
        """Run tokens, of which the last `rows` (all, if left out) but one are guesses; the tokens that follow."""
        ids = numpy.array(self._session.checked(tokens, position, len(tokens)), dtype=numpy.int32)
        with self.running:
            chosen = widths if isinstance(widths, bytes) else widths()
            step = Step(self._session, ids, position, chosen, len(ids) if rows is None else rows, sampling)
            self.run_steps([step])
        check(step.failed)
        return step.picked

    def _speculate(
        self,
        text: list[int],
        sampling: CSampling,
        widths: Widths,
        draft: Widths,
        guessing: tuple[Repetition, Rests],
        room: int,
    ) -> list[int]:
        """At least one new token: guesses that hold, and one of the wanted width after them."""
        repetition, rests = guessing
        start, counts = len(text) - 1, self.speculation
        guesses = repetition.guess(text, min(MOST_GUESSES, room))
        repeated = bool(guesses)
        if not repeated and rests.over():
            guesses = self._draft(text[-1], start, draft, min(MOST_DRAFTS, room))
        fresh = self._pick([text[-1], *guesses], start, widths, sampling)
        right = len(fresh) - 1
        counts.checks += 1
        if repeated:
            repetition.learn(len(guesses), right)
            counts.repeated += len(guesses)
            counts.repeated_right += right
        elif guesses:
            rests.learn(len(guesses), right)
            counts.drafted += len(guesses)
            counts.drafted_right += right
        return fresh

    def _draft(self, token: int, position: int, widths: Widths, most: int) -> list[int]:
        rows = -(-self.weights.model.shape.vocabulary // VOCABULARY_PART)
        with self.running:
            chosen = widths if isinstance(widths, bytes) else widths()
            return self._work.draft(
                self._session, token, position, chosen, most=most, rows=rows, margin=MARGIN, threads=self.threads
            )

    def pick(self, tokens: Sequence[int], position: int, widths: Widths, sampling: Sampling) -> int:
        """Run tokens at a position; the token that follows. For measuring, as `run` is."""
        return self._pick(tokens, position, widths, c_sampling(sampling), rows=1)[0]

    def run(self, tokens: Sequence[int], position: int, widths: Widths, logits: int = 1) -> Logits:
        """Run tokens at a position; the last rows of logits. For measuring: `tokens` is what continues a text."""
        with self.running:
            chosen = widths if isinstance(widths, bytes) else widths()
            return self._work.logits(self._session, tokens, position, chosen, threads=self.threads, rows=logits)

    def _widths(
        self, precision: Precision | str | None, overrides: Mapping[str, Precision | str] | None = None
    ) -> Callable[[], bytes]:
        """The widths of a precision, or of the one in use, when they are needed: an error now, and not then."""
        fixed = None if precision is None else Precision(precision)
        named = self.check_widths(fixed, overrides)

        def now() -> bytes:
            self.used, widths = self.widths_now(fixed, named)
            return widths

        return now

    def check_widths(self, precision: Precision | None, overrides: Mapping[str, Precision | str] | None) -> Overrides:
        """The overrides, if these widths are there or were to come and the layers are the model's; else an error."""
        named = tuple((pattern, Precision(width)) for pattern, width in (overrides or {}).items())
        for width in (*(width for _, width in named), *(() if precision is None else (precision,))):
            self._live.check(width)
        self.weights.widths(NARROWEST, {pattern: NARROWEST for pattern, _ in named})
        return named

    def widths_now(self, precision: Precision | None, overrides: Overrides = ()) -> tuple[Precision, bytes]:
        """The width in use for a precision, `self.precision` if it is None, and that of each part; hold `running`."""
        used = self._live.at(precision or self.precision)
        named = tuple((pattern, self._live.at(width)) for pattern, width in overrides)
        key = (used, named)
        if key not in self._chosen:
            if len(self._chosen) == MOST_WIDTHS:
                self._chosen.clear()
            self._chosen[key] = self.weights.widths(used, dict(named))
        return used, self._chosen[key]

    def check_prompt(self, prompt: Sequence[int], new: int) -> None:
        """An error if there is no prompt, or no room for it and for so many new tokens."""
        if len(prompt) == 0:
            raise OtaroError(NO_TOKENS)
        check_room(len(prompt), new, self.context)


def parse_cache(name: Precision | str) -> Precision | None:
    """How keys and values are kept: the width of their codes, None for float16."""
    try:
        return None if name == FLOAT16 else Precision(name)
    except PrecisionError as error:
        raise OtaroError(f"keys and values cannot be kept as {name}: choose {FLOAT16} or {join(Precision)}") from error
