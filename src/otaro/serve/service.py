"""What serves requests: the model, the queue before it, the precision, and the answers that are being written.

Tokens come from the scheduler's thread and go over to the event loop, where everything here lives. Whatever may wait
for the engine or take long (templates, tokenizers, planes that come and go) runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from fastapi import Request as HttpRequest

from otaro import __version__
from otaro.engine.engine import Engine
from otaro.engine.sampling import Sampling
from otaro.engine.scheduler import Request, Running, Scheduler, Token
from otaro.engine.scoring import scores
from otaro.engine.text import end_tokens
from otaro.errors import PrecisionError, first_line
from otaro.precision import Precision
from otaro.serve.answer import Answer, Piece
from otaro.serve.control import MOMENT, Choice, Control
from otaro.serve.logprobs import TokenTexts
from otaro.serve.mailbox import Mailbox
from otaro.serve.metrics import Metrics
from otaro.serve.problems import Problem
from otaro.serve.queue import RETRY_SECONDS, Queue, stopping

log = logging.getLogger("otaro.serve")

P = ParamSpec("P")
T = TypeVar("T")

PREPARING = 4
"""Prompts that are made into tokens at a time, long ones one at a time."""
LONG_PROMPT = 20_000
"""Letters; shorter ones are done in a moment."""


@dataclass(frozen=True)
class Limits:
    """What a server allows."""

    seats: int = 16
    """Answers that are written at a time."""
    waiting: int = 64
    """Requests that wait for a seat."""
    tokens: int | None = None
    """New tokens of an answer; as many as the context has room for if None."""
    seconds: float = 600.0
    """How long a request may take, waiting included."""
    body: int = 2 << 20
    """Bytes of a request's body."""
    grace: float = 30.0
    """Seconds that answers have to come to an end when the server stops."""


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Wanted:
    """One answer of a request."""

    prompt: Sequence[int]
    sampling: Sampling
    tokens: int
    """How many at most."""
    counted: bool = True
    """Whether its prompt counts: that of several answers to one does so once."""
    endless: bool = False
    """Whether tokens that end an answer are tokens like others."""


class Service:
    """A model that is being served."""

    def __init__(
        self, engine: Engine, scheduler: Scheduler, tokenizer: Any, control: Control, limits: Limits = Limits()
    ) -> None:
        self.engine, self.scheduler, self.tokenizer = engine, scheduler, tokenizer
        self.control, self.limits = control, limits
        self.queue = Queue(limits.seats, limits.waiting)
        self.mailbox = Mailbox()
        self.metrics = Metrics(self)
        self.texts = TokenTexts(tokenizer)
        self.end = end_tokens(engine, tokenizer)
        self.info = engine.weights.folder.info()
        self.created = int(time.time())
        self.fingerprint = f"otaro-{__version__}-{engine.weights.folder.pack[:8]}"
        self.stopping = False
        self.loading_error: str | None = None
        self._generations: set[Generation] = set()
        most = limits.seats + limits.waiting
        self._short, self._long = Queue(PREPARING, most), Queue(1, most)
        self._prompts: set[asyncio.Future[Any]] = set()
        self._most_letters = engine.context * max(map(len, tokenizer.get_vocab()), default=1)
        self._scored: set[threading.Event] = set()

    # ---- what a request goes through

    async def prepare(
        self, http: HttpRequest, letters: int, function: Callable[P, T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Run what makes a prompt of so many letters, in a thread; clients take turns, as for seats."""
        if letters > self._most_letters:
            raise Problem(
                400,
                f"{letters} characters of prompt are more than a context of {self.engine.context} tokens can hold: "
                "shorten it",
                code="context_length_exceeded",
            )
        queue, client = self._long if letters > LONG_PROMPT else self._short, http.state.client
        gone = asyncio.create_task(_gone(http))
        try:
            await self._turn(queue, client, 1, gone)
            work = in_thread(lambda: function(*arguments, **named))
            self._prompts.add(work)
            work.add_done_callback(self._prompts.discard)
            # A thread is not ended: whoever leaves meanwhile keeps others waiting no longer than that.
            work.add_done_callback(lambda _: queue.give_back(client))
            either: set[asyncio.Future[Any]] = {work, gone}
            await asyncio.wait(either, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise ClientGoneError if gone.done() else self._too_late()
        finally:
            gone.cancel()

    async def score(
        self, http: HttpRequest, tokens: Sequence[int], precision: Precision | None, top: int
    ) -> list[Token]:
        """The tokens of a prompt with their log probabilities, the first one without. It takes a seat as answers do."""
        gone, ended = asyncio.create_task(_gone(http)), threading.Event()
        try:
            await self._turn(self.queue, http.state.client, 1, gone)
            self._scored.add(ended)
            try:
                width = self.engine.width if precision is None else precision
                work = asyncio.create_task(
                    asyncio.to_thread(scores, self.engine, tokens, precision, top=top, ended=ended.is_set)
                )
                await asyncio.wait({work, gone}, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    ended.set()
                found = await work
            finally:
                ended.set()
                self._scored.discard(ended)
                self.queue.give_back(http.state.client)
        finally:
            gone.cancel()
        if found is None:
            if gone.done() and not gone.cancelled():
                raise ClientGoneError
            raise stopping() if self.stopping else Problem(503, "the prompt could not be scored in time: shorten it")
        scored = [Token(id, width, *score) for id, score in zip(tokens[1:], found, strict=True)]
        return [Token(tokens[0], width), *scored]

    def room(self, prompt: Sequence[int], asked: int | None) -> int:
        """How many tokens an answer to a prompt may have: what is asked for is the most, as OpenAI has it."""
        context = self.engine.context
        outside = next((token for token in prompt if token >= self.engine.weights.model.shape.vocabulary), None)
        if outside is not None:
            raise Problem(400, f"token {outside} is not in the model's vocabulary", param="prompt")
        if len(prompt) >= context:
            raise Problem(
                400,
                f"{len(prompt)} tokens of prompt leave no room for an answer in the context of {context}: shorten it",
                code="context_length_exceeded",
            )
        return min(limit for limit in (asked, context - len(prompt), self.limits.tokens) if limit is not None)

    async def begin(
        self,
        http: HttpRequest,
        kind: str,
        wanted: Sequence[Wanted],
        choice: Choice,
        stop: Sequence[str],
        logprobs: int | None,
    ) -> Generation:
        """Wait for a turn and begin to write the answers; `kind` begins the request's id."""
        if len(wanted) > self.limits.seats:
            raise Problem(400, f"{len(wanted)} answers are asked for and {self.limits.seats} are possible", param="n")
        client, begun = http.state.client, time.monotonic()
        gone = asyncio.create_task(_gone(http))
        try:
            await self._turn(self.queue, client, len(wanted), gone)
        except BaseException:
            gone.cancel()
            raise
        return Generation(self, f"{kind}-{uuid.uuid4().hex}", client, wanted, choice, stop, logprobs, gone, begun)

    async def _turn(self, queue: Queue, client: str, seats: int, gone: asyncio.Task[None]) -> None:
        turn = asyncio.create_task(queue.take(client, seats))
        try:
            await asyncio.wait({turn, gone}, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if turn.done():
                turn.result()
            elif gone.done():
                raise ClientGoneError
            else:
                raise self._too_late()
        finally:
            if not turn.done():
                turn.cancel()

    def _too_late(self) -> Problem:
        return Problem(
            503,
            f"no turn came within {self.limits.seconds:.0f} seconds: try again later",
            code="overloaded",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )

    # ---- what goes on beside them

    def add(self, generation: Generation) -> None:
        self._generations.add(generation)

    def remove(self, generation: Generation) -> None:
        self._generations.discard(generation)

    @property
    def answering(self) -> int:
        """Requests whose answers are being written."""
        return len(self._generations)

    async def watch(self) -> None:
        """Look every moment at the load, and at whether planes that were to come could be read."""
        while True:
            await asyncio.sleep(MOMENT)
            with contextlib.suppress(PrecisionError):  # planes that were dropped in this very moment
                self.control.observe(self.queue.waiting, self.queue.running, self.limits.seats)
            try:
                self.engine.check_loading()
            except Exception as error:  # of any kind: it is the background's
                self.loading_error = first_line(error)
                log.error("wider planes could not be loaded: %s", self.loading_error)

    def stop(self) -> None:
        """Turn away whoever waits or comes; what is being written may come to its end."""
        self.stopping = True
        for queue in (self.queue, self._short, self._long):
            queue.close()

    def cancel(self) -> None:
        """End all answers now."""
        for generation in list(self._generations):
            generation.cancel()
        for ended in self._scored:
            ended.set()
        for work in list(self._prompts):
            if not work.done():
                work.set_exception(stopping())

    def close(self) -> None:
        self.stop()
        self.cancel()
        self.scheduler.close()
        self.engine.close()


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """What a function returns or raises, run in a thread for which nobody has to wait when the server ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be that nobody asks

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop may be gone
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, daemon=True, name="otaro prompt").start()
    return future


async def _gone(http: HttpRequest) -> None:
    """Returns when the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


class Generation:
    """The answers to one request. `pieces` gives them as they come; `cancel`, or its end, frees their seats."""

    def __init__(
        self,
        service: Service,
        id: str,
        client: str,
        wanted: Sequence[Wanted],
        choice: Choice,
        stop: Sequence[str],
        logprobs: int | None,
        gone: asyncio.Task[None],
        begun: float,
    ) -> None:
        self.id, self.created, self.model = id, int(time.time()), choice.model
        self._service, self._client, self._begun = service, client, begun
        loop = service.mailbox.loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Token | None]] = asyncio.Queue()
        self._first: float | None = None
        self._made = 0
        self._expired = False
        self._gone, self._clock = (
            gone,
            loop.call_later(max(0.0, service.limits.seconds - (time.monotonic() - begun)), self._expire),
        )
        self.prompt_tokens = sum(len(one.prompt) for one in wanted if one.counted)
        self.answers = [Answer(index, service.tokenizer, stop, one.prompt) for index, one in enumerate(wanted)]
        self._running: list[Running] = []
        self._seats = len(wanted)
        decode, automatic = service.control.decode(choice)
        try:
            for index, one in enumerate(wanted):
                request = Request(
                    prompt=one.prompt,
                    max_new_tokens=one.tokens,
                    sampling=one.sampling,
                    precision=decode,
                    prefill=choice.prefill,
                    end=() if one.endless else service.end,
                    logprobs=logprobs,
                )
                self._running.append(service.scheduler.submit(request, self._hand_over(index)))
        except BaseException:
            self.cancel()
            for _ in range(len(wanted) - len(self._running)):
                self._free_seat()
            raise
        service.control.add(self.id, self._running, automatic)
        service.add(self)
        gone.add_done_callback(lambda _: self.cancel())

    @property
    def completion_tokens(self) -> int:
        return sum(answer.count for answer in self.answers)

    @property
    def usage(self) -> dict[str, Any]:
        prompt, new = self.prompt_tokens, self.completion_tokens
        reused = max((running.prompt_reused for running in self._running), default=0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": reused},
        }

    @property
    def widths(self) -> dict[str, int]:
        """How many tokens each width made."""
        counts: dict[Precision, int] = {}
        for answer in self.answers:
            for width, count in answer.widths.items():
                counts[width] = counts.get(width, 0) + count
        return {str(width): count for width, count in counts.items()}

    async def pieces(self) -> AsyncIterator[Piece]:
        """What comes of the answers; what came meanwhile is one piece. A Problem if they cannot be gone on with."""
        try:
            while any(answer.finish is None for answer in self.answers):
                events = [await self._events.get()]
                while not self._events.empty():
                    events.append(self._events.get_nowait())
                problem: Exception | None = None
                for event in events:
                    try:
                        self._take(*event)
                    except (Problem, ClientGoneError) as error:
                        problem = error
                        break
                for index in sorted({index for index, _ in events}):
                    piece = self.answers[index].take()
                    if piece is not None:
                        yield piece
                if problem is not None:  # after what came before it
                    raise problem
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the answers now; at their end this does nothing."""
        for running in self._running:
            if running.finish_reason is None:
                running.cancel()

    def _take(self, index: int, token: Token | None) -> None:
        answer, running = self.answers[index], self._running[index]
        if token is None:
            reason = running.finish_reason
            if answer.stopped or reason in ("stop", "length"):
                answer.end("stop" if reason == "stop" else "length")
            elif reason == "cancelled" and self._expired:
                answer.end("length")
            elif reason == "cancelled":
                raise stopping() if self._service.stopping else ClientGoneError
            else:
                log.error("%s failed: %s", self.id, running.error)
                raise Problem(500, f"the model could not go on: {first_line(running.error or Exception(reason))}")
        else:
            answer.push(token)
            if answer.stopped:
                running.cancel()

    def _hand_over(self, index: int) -> Callable[[Token | None], None]:
        """What the scheduler's thread calls."""
        return lambda token: self._service.mailbox.post(self._arrive, index, token)

    def _arrive(self, index: int, token: Token | None) -> None:
        if self._first is None and token is not None:
            self._first = time.monotonic() - self._begun
            self._service.metrics.first_token.observe(self._first)
        if token is not None:
            self._made += 1
            self._service.metrics.token(token.width)
        self._events.put_nowait((index, token))
        if token is None:
            self._free_seat()

    def _free_seat(self) -> None:
        self._seats -= 1
        self._service.queue.give_back(self._client)
        if self._seats == 0:
            self._finish()

    def _finish(self) -> None:
        """The last of the answers has ended, whatever became of them."""
        self._service.control.remove(self.id)
        self._service.remove(self)
        self._clock.cancel()
        self._gone.cancel()
        seconds = time.monotonic() - self._begun
        answers = zip(self.answers, self._running, strict=False)
        reasons = sorted("stop" if answer.stopped else running.finish_reason or "" for answer, running in answers)
        self._service.metrics.finished(self.prompt_tokens, seconds, reasons)
        log.info(
            "%s %s: %d tokens of prompt, %d new, %s, first after %s, %.2f s",
            *(self.id, self._client, self.prompt_tokens, self._made, ", ".join(dict.fromkeys(reasons))),
            *("-" if self._first is None else f"{self._first:.2f} s", seconds),
        )

    def _expire(self) -> None:
        self._expired = True
        self.cancel()
