"""Several texts at once: each the same to the bit as alone, whatever runs beside it; and the scheduler over them."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import architectures
import numpy
import pytest

from otaro.engine import native
from otaro.engine.engine import Engine
from otaro.engine.sampling import Sampling, c_sampling
from otaro.engine.scheduler import Request, Running, Scheduler, Token
from otaro.engine.session import Session, Step, Work, _Entry
from otaro.errors import OtaroError, PrecisionError
from otaro.ops import cpu
from otaro.precision import Precision

PATIENCE = 60
VOCABULARY = architectures.VOCABULARY
CONTEXT = 60


@pytest.fixture(scope="module", params=["llama", "window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = architectures.config("mistral" if request.param == "window" else "llama")
    if request.param == "window":
        config.sliding_window = 9
    return architectures.packed_model(config, tmp_path_factory.mktemp("sequences"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, threads=2)


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    made = Scheduler(engine, most_sequences=5, prompt_tokens=6)
    engine.precision = Precision.E5M8
    yield made
    made.close()


def ids(*tokens: int) -> Any:
    return numpy.array(tokens, dtype=numpy.int32)


class Script:
    """A text run in pieces of given lengths at given widths, so that it can be run alone and beside others."""

    def __init__(self, chance: random.Random, engine: Engine, longest: int = 40) -> None:
        layers = engine.weights.model.shape.layers
        self.pieces: list[tuple[int, list[int], bytes, int]] = []
        position = 0
        while position < longest:
            count = chance.choice((1, 1, 1, 2, 5, 17))
            tokens = [chance.randrange(VOCABULARY) for _ in range(min(count, CONTEXT - position))]
            if chance.random() < 0.7:
                widths = bytes([chance.choice((4, 8))] * (layers + 2))
            else:  # layers of their own
                widths = bytes([chance.randrange(4, 9), *(chance.randrange(3, 9) for _ in range(layers)), 6])
            self.pieces.append((position, tokens, widths, chance.randrange(len(tokens) + 1)))
            position += len(tokens)
            if position > 4 and chance.random() < 0.2:
                position -= chance.randrange(4)  # some of it is run again
        self.sampling = Sampling(0.9, top_k=30, repetition_penalty=1.2, seed=chance.randrange(99))

    def steps(self, session: Session) -> Iterator[Step]:
        for position, tokens, widths, rows in self.pieces:
            sampled = c_sampling(self.sampling) if len(tokens) == 1 and rows == 1 else None
            yield Step(session, ids(*tokens), position, widths, rows, sampled, None if sampled is None else 3)


def outcome(step: Step) -> tuple[Any, ...]:
    logits = None if step.logits is None else step.logits.tobytes()
    return logits, step.picked, step.logprobs, step.tops, step.session.length


@pytest.mark.parametrize("cache", [None, Precision.E5M8, Precision.E5M3], ids=str)
@pytest.mark.parametrize("isa", cpu.isas())
def test_a_text_is_the_same_to_the_bit_alone_and_in_company(engine: Engine, isa: str, cache: Precision | None) -> None:
    model = engine.weights.model
    chance = random.Random(f"{isa} {cache}")
    scripts = [Script(chance, engine) for _ in range(9)]
    expected = []
    for script in scripts:
        work, session = Work(model, isa=isa), Session(model, CONTEXT, cache=cache)
        results = []
        for step in script.steps(session):
            work.run([step], threads=1)
            results.append(outcome(step))
        expected.append(results)
    work = Work(model, isa=isa)
    found: list[list[tuple[Any, ...]]] = [[] for _ in scripts]
    # Of contexts of their own, as a scheduler's are.
    texts = [script.steps(Session(model, CONTEXT + number, cache=cache)) for number, script in enumerate(scripts)]
    while True:
        chosen = chance.sample(range(len(texts)), chance.randrange(1, len(texts) + 1))
        steps = [(number, step) for number in chosen if (step := next(texts[number], None)) is not None]
        if steps:
            work.run([step for _, step in steps], threads=chance.choice((1, 2, 3)))
        elif len(chosen) == len(texts):
            break
        for number, step in steps:
            found[number].append(outcome(step))
    assert found == expected


def test_more_rows_than_run_at_a_time_are_split(folder: Path) -> None:
    """Texts whose tokens fill several calls' worth of rows, logits of all of them wanted."""
    engine = Engine(folder, threads=2)
    chance = random.Random(1)
    model, widths = engine.weights.model, [engine.weights.widths(precision) for precision in Precision]
    texts = [[chance.randrange(VOCABULARY) for _ in range(count)] for count in (120, 3, 100, 1, 70, 128, 64)]

    def steps() -> list[Step]:
        return [
            Step(Session(model, 130), ids(*text), 0, widths[number % len(widths)], rows=len(text))
            for number, text in enumerate(texts)
        ]

    together = steps()
    Work(model).run(together, threads=2)
    for step, alone in zip(together, steps(), strict=True):
        Work(model).run([alone], threads=1)
        assert numpy.array_equal(step.logits, alone.logits)
        assert step.session.length == len(step.tokens)


def test_guesses_are_checked_up_to_the_first_that_is_wrong(engine: Engine) -> None:
    model, widths = engine.weights.model, engine.weights.widths(Precision.E5M8)
    work, sampling = Work(model), c_sampling(Sampling(1.5, seed=4))
    text = [5, 80, 3]
    alone = Session(model, CONTEXT)
    for position in range(12):
        step = Step(alone, ids(text[-1]) if position else ids(*text), alone.length, widths, 1, sampling)
        work.run([step], threads=1)
        text += step.picked
    fresh = text[3:]
    for right in range(5):
        wrong = (fresh[right] + 1) % VOCABULARY
        guesses = [*fresh[:right], wrong, *fresh[right + 1 : 6]]
        step = Step(Session(model, CONTEXT), ids(*text[:3], *guesses), 0, widths, len(guesses) + 1, sampling, 2)
        other = Step(Session(model, CONTEXT), ids(*text[:9]), 0, widths, 1, sampling)
        work.run([step, other], threads=2)
        assert step.picked == fresh[: right + 1]
        assert step.session.length == 3 + right
        assert len(step.logprobs) == len(step.tops) == right + 1
        assert other.picked == [text[9]]
        # What lies behind is forgotten: the text goes on from there, and not from further on.
        again = Step(step.session, ids(*step.picked[-1:]), 3 + right, widths, 1, sampling)
        work.run([again], threads=1)
        assert again.picked == [fresh[right + 1]]


def test_a_copy_goes_on_like_the_original(engine: Engine) -> None:
    chance = random.Random(2)
    model, widths = engine.weights.model, engine.weights.widths(Precision.E5M5)
    text = [chance.randrange(VOCABULARY) for _ in range(40)]
    for cache, length in itertools.product((None, Precision.E5M4), (1, 15, 16, 17, 33)):
        work, original = Work(model), Session(model, 64, cache=cache)
        work.logits(original, text, 0, widths, threads=1)
        expected = work.logits(Session(model, 64, cache=cache), text, 0, widths, threads=1)
        copy = Session(model, 41, cache=cache)
        work.logits(copy, text[::-1], 0, widths, threads=1)  # another text before
        copy.copy(original, length)
        assert copy.length == length
        assert numpy.array_equal(work.logits(copy, text[length:], length, widths, threads=2), expected)
        with pytest.raises(RuntimeError):
            copy.copy(original, 41)
        with pytest.raises(RuntimeError):
            Session(model, 10, cache=cache).copy(original, 11)
        with pytest.raises(RuntimeError):
            Session(model, 64, cache=Precision.E5M8).copy(original, 1)
        with pytest.raises(RuntimeError):
            original.copy(original, 1)


# ---- what a call refuses --------------------------------------------------------------------------------------------


def test_the_library_checks_entries_before_it_touches_memory(engine: Engine, folder: Path) -> None:
    library, model = native.library(), engine.weights.model
    work = Work(model)
    widths = engine.weights.widths(Precision.E5M4)
    sessions = [Session(model, 32) for _ in range(2)]
    tokens = ids(1, 2, 3)
    logits = numpy.empty((3, VOCABULARY), dtype=numpy.float32)
    picked, tops, logprobs = (ctypes.c_int32 * 3)(), (ctypes.c_int32 * 6)(), (ctypes.c_float * 9)()
    sampling = c_sampling(Sampling(0.5, seed=1))
    stranger = Session(Engine(folder, threads=1).weights.model, 32)

    def entry(of: Session, **changed: Any) -> _Entry:
        fields: dict[str, Any] = {
            "session": of.handle,
            "tokens": tokens.ctypes.data,
            "tokens_bytes": tokens.nbytes,
            "count": 3,
            "mantissa": widths,
            "mantissa_bytes": len(widths),
            "rows": 3,
            "logits": logits.ctypes.data,
            "logits_bytes": logits.nbytes,
            "sampling": ctypes.addressof(sampling),
            "picked": ctypes.addressof(picked),
            "picked_bytes": ctypes.sizeof(picked),
            "top": 2,
            "logprobs": ctypes.addressof(logprobs),
            "logprobs_bytes": ctypes.sizeof(logprobs),
            "top_tokens": ctypes.addressof(tops),
            "top_tokens_bytes": ctypes.sizeof(tops),
        }
        return _Entry(**{**fields, **changed})

    def run(*entries: _Entry, **changed: Any) -> int:
        array = (_Entry * len(entries))(*entries)
        fields = {
            "work": work.handle,
            "entries": array,
            "bytes": ctypes.sizeof(array),
            "count": len(array),
            "threads": 2,
        }
        error: int = library.otaro_run(*{**fields, **changed}.values())
        return error

    first, second = sessions
    assert run(entry(first), entry(second)) == 0
    assert run(entry(first, sampling=None), entry(second, sampling=None)) == 0
    argument, buffer, index = 1, 2, 4
    for name, value, error in (
        ("session", None, argument),
        ("session", first.handle, argument),  # that of the entry before it
        ("session", stranger.handle, argument),
        ("tokens", None, argument),
        ("tokens_bytes", 11, buffer),
        ("count", 0, argument),
        ("count", 2**40, argument),
        ("count", -1, argument),
        ("position", -1, argument),
        ("position", 30, index),
        ("position", 2**62, index),
        ("mantissa", None, argument),
        ("mantissa_bytes", 3, buffer),
        ("mantissa", bytes([4, 9, 4, 4]), argument),
        ("rows", -1, argument),
        ("rows", 4, argument),
        ("logits_bytes", logits.nbytes - 1, buffer),
        ("picked", None, argument),
        ("picked_bytes", 11, buffer),
        ("top", -2, argument),
        ("top", VOCABULARY + 1, argument),
        ("logprobs", None, argument),
        ("logprobs_bytes", 35, buffer),
        ("top_tokens", None, argument),
        ("top_tokens_bytes", 23, buffer),
    ):
        assert run(entry(first, position=1), entry(second, **{name: value})) == error, (name, value)
    for name, value in (
        *(("temperature", value) for value in (-1.0, numpy.nan, numpy.inf)),
        *(("top_p", value) for value in (0.0, 1.5, numpy.nan)),
        *(("min_p", value) for value in (-0.1, 1.5, numpy.nan)),
        *(("repetition_penalty", value) for value in (0.0, 101.0, numpy.nan)),
        ("top_k", -1),
    ):
        odd = c_sampling(Sampling())
        setattr(odd, name, value)
        assert run(entry(first), entry(second, sampling=ctypes.addressof(odd))) == argument, (name, value)
    # Nothing has changed: the first text still has the three tokens that it had.
    assert run(entry(first, position=3), entry(second, position=3)) == 0
    assert run(entry(first, logits=None, sampling=None)) == argument
    good = entry(first)
    for name, value, error in (
        ("work", None, argument),
        ("entries", None, argument),
        ("bytes", ctypes.sizeof(_Entry) - 1, buffer),
        ("count", 0, argument),
        ("count", 2**40, argument),
        ("threads", 0, argument),
        ("threads", 10**6, argument),
    ):
        assert run(good, **{name: value}) == error, (name, value)
    for token in (-1, VOCABULARY):
        tokens[1] = token
        assert run(entry(first)) == index
    engine_of_three = Engine(folder, "E5M3", threads=1)
    narrow = Step(engine_of_three.new_session(8), ids(1), 0, widths)
    with pytest.raises(PrecisionError, match="not loaded"):
        Work(engine_of_three.weights.model).run([narrow], threads=1)
    assert library.otaro_session_copy(first.handle, None, 1) == argument
    assert library.otaro_session_copy(first.handle, second.handle, -1) == argument
    assert library.otaro_session_copy(first.handle, second.handle, 7) == index
    assert library.otaro_session_copy(first.handle, stranger.handle, 1) == argument


def test_the_library_checks_drafts_before_it_touches_memory(engine: Engine) -> None:
    library, model = native.library(), engine.weights.model
    work, session, widths = Work(model), Session(model, 32), engine.weights.widths(Precision.E5M4)
    work.logits(session, [1, 2, 3], 0, widths, threads=1)
    drafts, count = (ctypes.c_int32 * 3)(), ctypes.c_int64(3)
    good: dict[str, Any] = {
        "work": work.handle,
        "session": session.handle,
        "token": 1,
        "position": 3,
        "widths": widths,
        "widths_bytes": len(widths),
        "rows": VOCABULARY,
        "margin": 0.0,
        "drafts": drafts,
        "drafts_bytes": ctypes.sizeof(drafts),
        "count": ctypes.byref(count),
        "threads": 2,
    }
    argument, buffer, index = 1, 2, 4
    for name, value, error in (
        ("work", None, argument),
        ("session", None, argument),
        ("token", -1, index),
        ("token", VOCABULARY, index),
        ("position", -1, argument),
        ("position", 4, index),
        ("widths_bytes", 3, buffer),
        ("rows", 0, argument),
        ("rows", VOCABULARY + 1, argument),
        ("drafts", None, argument),
        ("drafts_bytes", 11, buffer),
        ("count", None, argument),
        ("count", ctypes.byref(ctypes.c_int64(0)), argument),
        ("threads", 0, argument),
    ):
        count.value = 3
        assert library.otaro_draft(*{**good, name: value}.values()) == error, (name, value)
    count.value = 3
    assert library.otaro_draft(*good.values()) == 0
    assert count.value == 3


# ---- cancelling -----------------------------------------------------------------------------------------------------


def test_a_cancelled_text_is_left_out_and_the_others_do_not_notice(engine: Engine) -> None:
    model, widths = engine.weights.model, engine.weights.widths(Precision.E5M8)
    work, text = Work(model), [(7 * i) % VOCABULARY for i in range(40)]
    expected = Work(model).logits(Session(model, CONTEXT), text, 0, widths, threads=1)
    gone = Step(Session(model, CONTEXT), ids(*text[:3]), 0, widths, 0)
    work.run([gone], threads=1)
    cancelled = Step(gone.session, ids(*text[3:]), 3, widths, 2, cancel=ctypes.c_int32(1))
    other = Step(Session(model, CONTEXT), ids(*text), 0, widths)
    work.run([cancelled, other], threads=2)
    assert cancelled.cancelled
    assert not other.cancelled
    assert cancelled.session.length == 3
    assert numpy.array_equal(other.logits, expected)
    assert numpy.array_equal(work.logits(gone.session, text[3:], 3, widths, threads=1), expected)


def test_a_cancel_takes_effect_within_a_call(engine: Engine) -> None:
    """While another thread runs it: the call ends long before all of it has been run."""
    model, widths = engine.weights.model, engine.weights.widths(Precision.E5M8)
    tokens = numpy.zeros(2**17, dtype=numpy.int32)
    step = Step(Session(model, len(tokens)), tokens, 0, widths, 0, cancel=ctypes.c_int32(0))
    thread = threading.Thread(target=Work(model).run, args=([step],), kwargs={"threads": 1})
    thread.start()
    time.sleep(0.05)
    assert step.cancel is not None
    step.cancel.value = 1
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert step.cancelled
    assert step.session.length == 0


# ---- the scheduler --------------------------------------------------------------------------------------------------


def alone(engine: Engine, request: Request) -> list[int]:
    """The same text from an engine of its own."""
    own = Engine(engine.weights.folder.path, threads=1)
    if request.precision is not None:
        own.precision = request.precision
    return list(
        own.tokens(
            request.prompt,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            prefill=request.prefill,
            overrides=request.overrides,
            end=request.end,
        )
    )


def some_requests(chance: random.Random, count: int) -> list[Request]:
    requests = []
    for number in range(count):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.choice((1, 3, 9, 25)))]
        requests.append(
            Request(
                prompt,
                chance.choice((1, 4, 20)),
                chance.choice((Sampling(), Sampling(0.9, top_p=0.9, seed=number))),
                chance.choice((None, *Precision)),
                chance.choice((None, None, Precision.E5M4)),
                chance.choice((None, None, {"model.layers.0": Precision.E5M6})),
                end=[chance.randrange(VOCABULARY)],
            )
        )
    return requests


def test_texts_in_any_company_are_those_that_run_alone(engine: Engine, scheduler: Scheduler) -> None:
    requests = some_requests(random.Random(3), 24)
    running = [scheduler.submit(request) for request in requests]
    for request, one in zip(requests, running, strict=True):
        tokens = list(one)
        expected = alone(engine, request)
        assert [token.id for token in tokens] == expected
        assert one.finish_reason == ("length" if len(expected) == request.max_new_tokens else "stop")
        assert all(token.width == (request.precision or Precision.E5M8) for token in tokens[1:])
        assert list(one) == []  # it has been given out
    assert (scheduler.waiting, scheduler.running) == (0, 0)


def test_tokens_come_to_a_callback_too_and_none_at_the_end(scheduler: Scheduler) -> None:
    given: list[Token | None] = []
    over = threading.Event()

    def on_token(token: Token | None) -> None:
        given.append(token)
        if token is None:
            over.set()

    one = scheduler.submit(Request([5, 80, 3], 6), on_token)
    assert over.wait(PATIENCE)
    assert given == [*one, None]
    assert len(given) == 7


def test_logprobs_are_those_of_the_model(engine: Engine, scheduler: Scheduler) -> None:
    prompt = [5, 80, 3, 44]
    tokens = list(scheduler.submit(Request(prompt, 5, Sampling(2.0, top_k=9, seed=1), logprobs=4)))
    logits = engine.logits([*prompt, *(token.id for token in tokens)])[len(prompt) - 1 :].astype(numpy.float64)
    for token, row in zip(tokens, logits, strict=False):
        expected = row - row.max() - numpy.log(numpy.exp(row - row.max()).sum())
        order = numpy.argsort(-row, kind="stable")[:4]
        assert [number for number, _ in token.top] == order.tolist()
        assert [value for _, value in token.top] == pytest.approx(expected[order].tolist(), abs=1e-5)
        assert token.logprob == pytest.approx(expected[token.id], abs=1e-5)
    plain = list(scheduler.submit(Request(prompt, 5, Sampling(2.0, top_k=9, seed=1), logprobs=0)))
    assert [(token.id, token.logprob, token.top) for token in plain] == [(t.id, t.logprob, ()) for t in tokens]


def test_equal_beginnings_are_reused_and_nothing_changes(engine: Engine) -> None:
    scheduler = Scheduler(engine, prompt_tokens=8, kept=2)
    engine.precision = Precision.E5M8
    system = [(5 * i) % VOCABULARY for i in range(20)]
    first = scheduler.submit(Request([*system, 7], 6))
    answer = [token.id for token in first]
    assert first.prompt_reused == 0
    # The conversation goes on, begins anew, and does so at another width.
    longer = [*system, 7, *answer, 9, 9]
    for prompt, precision, reused in (
        (longer, None, 20 + 1 + 5),  # the last token of an answer is never run
        ([*system, 8], None, 20),
        ([*system, 7], None, 20),  # one token is left to run
        ([*system, 8], Precision.E5M3, 0),
        ([*system, 9], Precision.E5M3, 20),
        ([1, *system], None, 0),
    ):
        request = Request(prompt, 4, precision=precision)
        one = scheduler.submit(request)
        assert [token.id for token in one] == alone(engine, request)
        assert one.prompt_reused == reused, prompt
    # Several at once: who comes later finds what the first has read by then.
    texts = [scheduler.submit(Request([*system[::-1], *range(20), number], 3)) for number in range(3)]
    for one in texts:
        assert [token.id for token in one] == alone(engine, one.request)
    assert texts[0].prompt_reused == 0
    assert min(one.prompt_reused for one in texts[1:]) >= 16
    assert len(scheduler._kept) <= 2
    scheduler.close()
    assert not scheduler._kept


def test_a_width_set_midway_acts_on_the_next_token(engine: Engine, scheduler: Scheduler) -> None:
    engine.precision = Precision.E5M8

    def on_token(token: Token | None) -> None:
        own.precision = Precision.E5M4  # the one to come

    ready = threading.Event()
    own = scheduler.submit(Request([5, 80, 3], 30), lambda token: ready.wait(PATIENCE) and on_token(token))
    ready.set()
    widths = [token.width for token in own]
    assert widths[0] == Precision.E5M8
    assert set(widths[1:]) == {Precision.E5M4}
    with pytest.raises(PrecisionError):
        own.precision = "E5M9"  # type: ignore[assignment]


def test_planes_come_and_go_while_texts_run(folder: Path) -> None:
    engine = Engine(folder, threads=2, progressive=True)
    scheduler = Scheduler(engine, most_sequences=4)
    texts = [scheduler.submit(Request([number, 80, 3], 50)) for number in range(4)]
    first = next(iter(texts[0]))
    assert first.width >= Precision.E5M3
    engine.finish_loading()
    for _ in range(5):
        engine.drop_to("E5M3")
        assert engine.memory["cache"] > 0
        engine.raise_to("E5M8")
        engine.precision = Precision.E5M5
    for one in texts:
        assert len(list(one)) in (49, 50)
        assert one.finish_reason == "length"
    scheduler.close()


def test_an_engine_s_own_text_and_a_scheduler_s_take_turns(engine: Engine, scheduler: Scheduler) -> None:
    engine.precision = Precision.E5M8
    expected = list(engine.tokens([5, 80, 3], max_new_tokens=20))
    texts = [scheduler.submit(Request([5, 80, 3], 40)) for _ in range(3)]
    for _ in range(3):
        assert list(engine.tokens([5, 80, 3], max_new_tokens=20, draft="E5M3")) == expected
    for one in texts:
        assert [token.id for token in one][:20] == expected


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


class Held:
    """A callback that lets the scheduler's thread go on when it is told to."""

    def __init__(self) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()

    def __call__(self, token: Token | None) -> None:
        self.reached.set()
        assert self.let_go.wait(PATIENCE)


def test_texts_are_cancelled_while_they_wait_and_while_they_run(engine: Engine) -> None:
    scheduler = Scheduler(engine, most_sequences=2)
    held = Held()
    texts = [scheduler.submit(Request([number, 1], 40), held if number == 0 else None) for number in range(5)]
    assert held.reached.wait(PATIENCE)
    assert scheduler.running + scheduler.waiting == 5
    assert scheduler.running <= 2
    for number in (1, 3):
        texts[number].cancel()
        assert texts[number].finish_reason is None  # it returns at once
    held.let_go.set()
    for number, one in enumerate(texts):
        tokens = [token.id for token in one]
        cancelled = number in (1, 3)
        assert one.finish_reason == ("cancelled" if cancelled else "length")
        expected = alone(engine, one.request)
        assert tokens == expected[: len(tokens)] if cancelled else tokens == expected
    assert list(texts[3]) == []
    scheduler.close()


def test_closing_ends_what_is_there_or_waits_for_it(engine: Engine) -> None:
    for wait in (False, True):
        scheduler = Scheduler(engine, most_sequences=2)
        held = Held()
        texts = [scheduler.submit(Request([number, 1], 20), held if number == 0 else None) for number in range(4)]
        assert held.reached.wait(PATIENCE)
        closing = threading.Thread(target=scheduler.close, args=(wait,))
        closing.start()
        wait_until(lambda scheduler=scheduler: scheduler._closed)  # type: ignore[misc]
        with pytest.raises(OtaroError, match="closed"):
            scheduler.submit(Request([1], 1))
        held.let_go.set()
        closing.join(PATIENCE)
        assert not closing.is_alive()
        assert {one.finish_reason for one in texts} == {"length" if wait else "cancelled"}
        assert all(len(list(one)) == 20 for one in texts) == wait
        scheduler.close()
    # From within, where waiting for itself would never end.
    scheduler = Scheduler(engine)
    one = scheduler.submit(Request([1], 20), lambda token: scheduler.close())
    assert len(list(one)) < 20
    assert one.finish_reason == "cancelled"


def test_what_goes_wrong_with_one_text_is_told_there(
    engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(token: Token | None) -> None:
        raise ValueError("nobody listens")

    texts = [scheduler.submit(Request([number, 1], 9), broken if number == 1 else None) for number in range(3)]
    for number, one in enumerate(texts):
        if number == 1:
            with pytest.raises(ValueError, match="nobody listens"):
                list(one)
            assert one.finish_reason == "error"
        else:
            assert len(list(one)) == 9
    original = Work.run

    def spoil(work: Work, steps: list[Step], **named: Any) -> None:
        original(work, steps, **named)
        for step in steps:
            step.failed = 3 if step.tokens[0] == 77 else 0

    with monkeypatch.context() as patch:
        patch.setattr(Work, "run", spoil)
        good, bad = scheduler.submit(Request([1], 3)), scheduler.submit(Request([77], 3))
        with pytest.raises(OtaroError, match="not finite"):
            list(bad)
        assert len(list(good)) == 3
    with monkeypatch.context() as patch:
        patch.setattr(Work, "run", lambda work, steps, **named: native.check(7))
        texts = [scheduler.submit(Request([1], 3)) for _ in range(2)]
        for one in texts:
            with pytest.raises(OtaroError, match="not enough memory"):
                list(one)
    assert len(list(scheduler.submit(Request([1], 3)))) == 3  # and it goes on


def test_texts_that_have_ended_go_where_memory_is_short(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(engine)
    list(scheduler.submit(Request([1, 2, 3], 3)))
    wait_until(lambda: len(scheduler._kept) == 1)
    original = Engine.new_session

    def new_session(engine: Engine, context: int) -> Session:
        if scheduler._kept:
            native.check(7)
        return original(engine, context)

    monkeypatch.setattr(Engine, "new_session", new_session)
    assert len(list(scheduler.submit(Request([1, 2, 3], 3)))) == 3
    scheduler.close()


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request([], 3), "no tokens"),
        (Request([1], 0), "max_new_tokens"),
        (Request([1], 10**6), "do not fit the context"),
        (Request([VOCABULARY], 3), "outside the vocabulary"),
        (Request("text", 3), "this is text"),  # type: ignore[arg-type]
        (Request([1], 3, logprobs=-1), "logprobs"),
        (Request([1], 3, overrides={"nothing": Precision.E5M3}), "no layer is called"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_said_at_once(scheduler: Scheduler, request_: Request, message: str) -> None:
    with pytest.raises(OtaroError, match=message):
        scheduler.submit(request_)
    assert (scheduler.waiting, scheduler.running) == (0, 0)


def test_a_precision_that_is_not_loaded_is_refused_or_followed(folder: Path) -> None:
    engine = Engine(folder, "E5M5", threads=1)
    scheduler = Scheduler(engine)
    for fields in ({"precision": Precision.E5M6}, {"prefill": Precision.E5M6}):
        with pytest.raises(PrecisionError, match="E5M6 is not loaded"):
            scheduler.submit(Request([1], 3, **fields))
    held = Held()
    one = scheduler.submit(Request([1], 9, precision=Precision.E5M5), held)
    assert held.reached.wait(PATIENCE)
    engine.drop_to("E5M3")
    held.let_go.set()
    assert {token.width for token in one} == {Precision.E5M5, Precision.E5M3}
    scheduler.close()


def test_submitting_from_many_threads_gives_each_its_own(engine: Engine, scheduler: Scheduler) -> None:
    requests = some_requests(random.Random(5), 12)
    expected = [alone(engine, request) for request in requests]
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        running: Running = scheduler.submit(requests[number])
        found[number] = [token.id for token in running]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [found[number] for number in range(len(requests))] == expected
