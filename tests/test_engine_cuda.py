"""The engine on CUDA without a GPU: the same code in plain torch, its products also by the emulated kernels."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import numpy
import pytest
import torch

import otaro
from otaro import ops
from otaro.cli import main
from otaro.engine import native
from otaro.engine.architecture import UnsupportedError
from otaro.engine.cuda import forward, launches, matrices, picking, plain, weights
from otaro.engine.cuda.ahead import Ahead
from otaro.engine.cuda.matrices import DenseMatrix
from otaro.engine.cuda.model import Experts
from otaro.engine.cuda.rows import CacheLayout, DeviceSession
from otaro.engine.cuda.weights import DeviceWeights
from otaro.engine.cuda.work import MOST_ROWS, Captured, DeviceWork, Kind
from otaro.engine.engine import Engine
from otaro.engine.sampling import Sampling, c_sampling, sample
from otaro.engine.scheduler import Request, Scheduler
from otaro.engine.session import Step
from otaro.errors import OtaroError, PrecisionError
from otaro.ops import cuda
from otaro.precision import Precision
from tests.cuda_emulation import build, install

PLAIN = launches.PLAIN
VOCABULARY = architectures.VOCABULARY
TEXT = [random.Random(1).randrange(VOCABULARY) for _ in range(40)]
NAMES = ("llama", "llama-tied", "qwen2", "qwen3", "mistral", "mixtral", "qwen3-moe")
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def packed(name: str) -> Path:
        config = architectures.config(name)
        if name == "mistral":
            config.sliding_window = 9
        if name == "llama-tied":
            config.attention_bias = config.mlp_bias = True
        return architectures.packed_model(config, tmp_path_factory.mktemp(name))

    return packed


@pytest.fixture(scope="module")
def engine(folders: Any) -> Engine:
    return Engine(folders("llama"), device=PLAIN)


def ids(*tokens: int) -> Any:
    return numpy.array(tokens, dtype=numpy.int32)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(folders: Any, name: str) -> None:
    engine, model = Engine(folders(name), device=PLAIN), otaro.load(folders(name))
    for precision in (Precision.E5M8, Precision.E5M3):
        model.set_precision(precision)
        with torch.no_grad():
            wanted = model(torch.tensor([TEXT])).logits[0].numpy()
        assert abs(engine.logits(TEXT, precision) - wanted).max() < ROUNDING
        widths, position, pieces = engine.weights.widths(precision), 0, []
        for count in (17, 1, 1, 5, 16):  # of prompts and of batches
            pieces.append(engine.run(TEXT[position : position + count], position, widths, logits=count))
            position += count
        assert abs(numpy.concatenate(pieces) - wanted).max() < ROUNDING


def test_logits_are_near_those_of_the_native_engine(folders: Any, engine: Engine) -> None:
    wanted = Engine(folders("llama"), threads=1).logits(TEXT, "E5M5")
    found = engine.logits(TEXT, "E5M5")
    assert abs(found - wanted).max() < 0.05 * abs(wanted).max()


def test_texts_in_company_are_as_alone(engine: Engine) -> None:
    chance = random.Random(3)
    widths = [engine.weights.widths(width) for width in (Precision.E5M8, Precision.E5M4)]
    texts = [
        [[chance.randrange(VOCABULARY) for _ in range(chance.choice((1, 1, 2, 7, 20)))] for _ in range(4)]
        for _ in range(11)
    ]

    def steps(sessions: list[Any], turn: int) -> list[Step]:
        return [
            Step(session, ids(*text[turn]), session.length, widths[number % 2], rows=1 + number % len(text[turn]))
            for number, (session, text) in enumerate(zip(sessions, texts, strict=True))
        ]

    together, alone = ([engine.new_session(60) for _ in texts] for _ in range(2))
    for turn in range(4):
        run = steps(together, turn)
        engine.run_steps(run)
        for step, single in zip(run, steps(alone, turn), strict=True):
            engine.run_steps([single])
            assert step.session.length == single.session.length
            assert abs(step.logits - single.logits).max() < ROUNDING  # type: ignore[operator]


def test_tokens_are_switched_drafted_and_drawn_as_on_a_cpu(engine: Engine) -> None:
    """By the rules of the engine: the width between tokens, guesses that decide nothing, a seed that decides all."""
    drawn = Sampling(0.8, top_k=20, top_p=0.9, seed=3)
    for sampling in (Sampling(), drawn, Sampling(1.2, repetition_penalty=1.3, seed=1)):
        plainly = list(engine.tokens(TEXT[:9], max_new_tokens=24, sampling=sampling))
        assert list(engine.tokens(TEXT[:9], max_new_tokens=24, sampling=sampling, draft="E5M3")) == plainly
        assert engine.speculation.checks < 24
    made = engine.tokens(TEXT[:9], max_new_tokens=8)
    switched = list(itertools.islice(made, 4))
    engine.precision = Precision.E5M3
    switched += list(made)
    assert engine.used == Precision.E5M3
    engine.precision = Precision.E5M8
    session, text = engine.new_session(60), TEXT[:9]
    for number in range(8):
        width = engine.weights.widths(Precision.E5M8 if number < 4 else Precision.E5M3)
        step = Step(session, ids(*text[session.length :]), session.length, width, 1, c_sampling(Sampling()))
        engine.run_steps([step])
        text += step.picked
    assert switched == text[9:]


def test_planes_are_dropped_and_raised(folders: Any) -> None:
    engine = Engine(folders("llama-tied"), device=PLAIN)
    wide, held = engine.logits(TEXT, "E5M8"), engine.memory["weights"]
    narrow = engine.logits(TEXT, "E5M4")
    engine.drop_to("E5M4")
    assert engine.memory["weights"] < 0.65 * held
    assert numpy.array_equal(engine.logits(TEXT), narrow)
    with pytest.raises(PrecisionError):
        engine.logits(TEXT, "E5M8")
    with pytest.raises(PrecisionError):
        engine._work.logits(engine._session, TEXT, 0, bytes([8] * 4), threads=1)
    engine.raise_to("E5M8")
    assert engine.memory["weights"] == held
    assert numpy.array_equal(engine.logits(TEXT), wide)


def test_planes_join_in_the_background(folders: Any) -> None:
    engine = Engine(folders("qwen2"), device=PLAIN, progressive=True)
    first = list(engine.tokens(TEXT[:5], max_new_tokens=3))
    engine.finish_loading()
    assert engine.width == Precision.E5M8
    assert len(first) == 3
    assert abs(engine.logits(TEXT) - Engine(folders("qwen2"), device=PLAIN).logits(TEXT)).max() == 0


def test_many_texts_under_a_scheduler(engine: Engine) -> None:
    requests = [
        Request(
            TEXT[: 3 + number], 12, Sampling(0.7 * (number % 2), seed=number), Precision.from_mantissa(3 + number % 6)
        )
        for number in range(19)
    ]
    scheduler = Scheduler(engine, most_sequences=18, prompt_tokens=20)
    running = [scheduler.submit(request) for request in requests]
    found = [[token.id for token in text] for text in running]
    scheduler.close()
    for request, tokens in zip(requests, found, strict=True):
        engine.precision = request.precision or Precision.E5M8
        alone = engine.tokens(request.prompt, max_new_tokens=12, sampling=request.sampling)
        assert list(alone) == tokens
    engine.precision = Precision.E5M8
    logprobs = scheduler_logprobs(engine)
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def scheduler_logprobs(engine: Engine) -> tuple[float, float]:
    scheduler = Scheduler(engine)
    token = next(iter(scheduler.submit(Request(TEXT[:6], 1, logprobs=3))))
    scheduler.close()
    row = torch.log_softmax(torch.from_numpy(engine.logits(TEXT[:6])[-1]), -1)
    assert [place for place, _ in token.top] == row.topk(3).indices.tolist()
    return token.logprob or 0.0, float(row[token.id])


@pytest.mark.parametrize("dimension", [12, 64, 80, 128])
def test_keys_and_values_in_codes_are_those_of_the_native_engine(dimension: int) -> None:
    x = torch.randn(7, dimension) * torch.randn(7, 1).exp()
    x[3] = 0
    for precision in Precision:
        layout = CacheLayout(dimension, precision)
        rows, scales = plain.encode(x, layout)
        assert (rows.shape[-1], scales.shape[-1]) == (layout.row, layout.scales)
        assert torch.equal(plain.decode(rows, scales, layout, torch.float32), native.round_keys(x, precision))
        if dimension % 32 == 0:
            assert 8 * layout.row == dimension * (1 + precision.mantissa)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_texts_with_keys_and_values_in_codes(folders: Any, name: str) -> None:
    whole, coded = (Engine(folders(name), device=PLAIN, kv_cache=kind) for kind in ("float16", "E5M8"))
    wanted, found = whole.logits(TEXT), coded.logits(TEXT)
    assert 0 < abs(found - wanted).max() < 0.03 * abs(wanted).max()
    # 12 dimensions take the words of 32 and a byte of scale; of float32 here.
    assert coded.memory["full_cache"] * 12 * 4 == whole.memory["full_cache"] * (32 * 9 // 8 + 1)
    steps = [coded.run([token], place, coded.weights.widths(Precision.E5M8)) for place, token in enumerate(TEXT)]
    assert abs(numpy.concatenate(steps) - found).max() < ROUNDING


@pytest.mark.parametrize("cache", ["float16", "E5M6"])
def test_texts_grow_shrink_and_are_copied(folders: Any, cache: str) -> None:
    engine = Engine(folders("llama"), device=PLAIN, kv_cache=cache)
    session = engine.new_session(60)
    assert isinstance(session, DeviceSession)
    widths = engine.weights.widths(Precision.E5M8)
    engine._work.logits(session, TEXT[:20], 0, widths, threads=1)
    other = engine.new_session(200)
    other.expect(100)
    assert other.capacity > session.capacity  # scales lie behind as many rows
    other.copy(session, 15)
    more = [engine._work.logits(one, TEXT[15:], 15, widths, threads=1) for one in (session, other)]
    assert numpy.array_equal(*more)
    session.expect(10)
    assert session.length == 10
    again = engine._work.logits(session, TEXT[10:], 10, widths, threads=1)
    assert abs(again - more[0]).max() < ROUNDING


def test_tokens_are_drawn_as_by_the_native_sampler() -> None:
    generator = torch.Generator().manual_seed(0)
    chance = random.Random(0)
    for case in range(300):
        logits = torch.randn(1, 700, generator=generator) * chance.choice((0.5, 3, 10))
        settings = Sampling(
            chance.choice((0, 0.3, 1.0, 2.5)),
            chance.choice((0, 0, 1, 5, 300, 900)),
            chance.choice((1.0, 0.95, 0.4)),
            chance.choice((0.0, 0.0, 0.1)),
            seed=chance.choice((case, 2**64 - 1 - case)),
        )
        numbers = (settings.temperature, settings.top_p, settings.min_p)
        wholes = (settings.top_k, picking.signed(settings.seed or 0), case)
        found = picking.drawn(
            logits,
            *(torch.tensor([number], dtype=torch.float64) for number in numbers),
            *(torch.tensor([number]) for number in wholes),
        )
        wanted, _, _ = sample(c_sampling(settings), logits[0].numpy(), position=case)
        assert int(found) == wanted, settings


def test_a_penalty_is_the_native_one() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0))
    for penalty in (1.3, 0.7):
        history = [5, 5, int(logits.argmax()), 299]
        wanted, _, _ = sample(c_sampling(Sampling(repetition_penalty=penalty)), logits.numpy(), history)
        assert int(picking.penalized(logits, torch.tensor(sorted(set(history))), penalty).argmax()) == wanted


def test_numbers_that_are_not_finite_end_one_text_alone(folders: Any) -> None:
    engine = Engine(folders("llama"), device=PLAIN)
    engine._work._model.final_norm[0] = torch.nan  # type: ignore[attr-defined]
    with pytest.raises(OtaroError, match="not finite"):
        list(engine.tokens(TEXT[:3], max_new_tokens=2))
    with pytest.raises(OtaroError, match="not finite"):
        list(engine.tokens(TEXT[:3], max_new_tokens=2, sampling=Sampling(1.0)))


def test_a_text_without_memory_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, greedy = engine.weights.widths(Precision.E5M8), c_sampling(Sampling())
    room = DeviceSession._room

    def little(session: DeviceSession, capacity: int) -> torch.Tensor:
        if capacity > 64:
            raise torch.OutOfMemoryError("out of memory")
        return room(session, capacity)

    monkeypatch.setattr(DeviceSession, "_room", little)
    long, short = DeviceSession(engine.weights.model, 200), DeviceSession(engine.weights.model, 60)  # type: ignore[arg-type]
    long.expect(100)
    steps = [Step(one, ids(*TEXT * count), 0, widths, 1, greedy) for one, count in ((long, 2), (short, 1))]
    engine.run_steps(steps)
    with pytest.raises(OtaroError, match="not enough memory"):
        native.check(steps[0].failed)
    assert len(steps[1].picked) == 1


def test_texts_go_on_after_an_error_in_a_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run_prompt, failures = DeviceWork._run_prompt, list[int]()

    def failing(work: DeviceWork, step: Step) -> None:
        if not failures:
            failures.append(1)
            raise torch.OutOfMemoryError("out of memory")
        run_prompt(work, step)

    wanted = [list(engine.tokens(prompt, max_new_tokens=12)) for prompt in (TEXT[:4], TEXT)]
    scheduler, others = Scheduler(engine), list[Any]()

    def begin_another(token: Any) -> None:
        if not others:
            others.append(scheduler.submit(Request(TEXT, 12)))

    list(scheduler.submit(Request(TEXT[9:12], 2)))  # kept, and given up for the sake of the others
    monkeypatch.setattr(DeviceWork, "_run_prompt", failing)
    running = scheduler.submit(Request(TEXT[:4], 12), begin_another)
    found = [[token.id for token in running]]
    found += [[token.id for token in text] for text in others]
    scheduler.close()
    assert failures
    assert found == wanted


def test_short_memory_is_said_in_a_sentence(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folders("llama"), device=PLAIN)
    model, widths = engine.weights.model, engine.weights.widths(Precision.E5M8)
    long, short = (DeviceSession(model, 400) for _ in range(2))  # type: ignore[arg-type]
    engine._work.logits(long, TEXT * 5, 0, widths, threads=1)

    def none(session: DeviceSession, capacity: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(DeviceSession, "_room", none)
    long.expect(20)
    assert long.length == 20
    with pytest.raises(OtaroError, match="not enough memory"):
        short.copy(long, 10)
    with pytest.raises(OtaroError, match="not enough memory"):
        engine._work.draft(short, 1, 0, widths, most=2, rows=9, margin=0.0, threads=1)
    engine.drop_to("E5M4")
    monkeypatch.setattr(weights, "free_bytes", lambda device: 1000)
    with pytest.raises(OtaroError, match="E5M4 stays in use"):
        engine.raise_to("E5M8")
    assert engine.width == Precision.E5M4
    query = next(name for name in engine.weights._floors if "q_proj" in name)
    engine.weights._floors[query] = Precision.E5M5
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match="different narrowest"):
        engine.weights._prepare()
    with pytest.raises(OtaroError, match="prompt_tokens"):
        Scheduler(engine, prompt_tokens=0)


def test_experts_that_were_not_chosen_add_nothing() -> None:
    shape: Any = SimpleNamespace(experts=2, experts_per_token=1, experts_normalized=True, hidden=4)
    shape.expert_intermediate = 3
    router, gate_up, down = torch.zeros(2, 4), torch.ones(12, 4), torch.ones(8, 3)
    router[0], gate_up[6:] = 1, 1e30
    experts = Experts(router, DenseMatrix(gate_up), DenseMatrix(down))
    found = forward._experts(experts, torch.ones(3, 4), 8, shape, torch.tensor([True, True, False]))
    assert bool(found.isfinite().all())


class Replay:
    """Stands for a captured graph: runs again what was run, into the same memory."""

    def __init__(self, work: GraphWork, kind: Kind) -> None:
        self.work, self.kind = work, kind

    def replay(self) -> None:
        captured = self.work._captured[self.kind]
        texts = {session.cache.data_ptr(): session for session in self.work.texts}
        sessions = [texts.get(address) for address in captured.inputs[2].tolist()]
        outcome = self.work._forward(captured.inputs, self.kind, sessions)
        captured.outcome.logits.copy_(outcome.logits)
        captured.outcome.picked.copy_(outcome.picked)
        if captured.outcome.margin is not None and outcome.margin is not None:
            captured.outcome.margin.copy_(outcome.margin)
        self.work.replays += 1


class GraphWork(DeviceWork):
    """Goes the way of a GPU: the first run as it is, further ones by replaying."""

    replays = 0

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.weights.model)  # type: ignore[arg-type]
        self._graphs = True
        self.texts: Any = engine._sessions

    def _capture(self, kind: Kind, inputs: torch.Tensor) -> None:
        self._make_room()
        outcome = self._forward(inputs, kind, [None] * kind.size)
        self._captured[kind] = Captured(Replay(self, kind), inputs, outcome)


def test_steps_are_launched_ahead_where_they_follow_one_another() -> None:
    ahead, fields = Ahead(), numpy.arange(9)
    assert not ahead.launched("kind", fields)
    assert not ahead.worth
    ahead.expect("kind", fields, False)
    assert not ahead.launched("kind", fields)
    assert ahead.worth
    ahead.expect("kind", fields, True)
    assert ahead.launched("kind", fields)
    assert ahead.worth
    ahead.expect("kind", fields, True)
    assert not ahead.launched("kind", fields + 1)  # for nothing: now it takes four in a row
    for followed in range(5):
        assert ahead.worth == (followed >= 4)
        ahead.expect("kind", fields, False)
        assert not ahead.launched("kind", fields)
    ahead.expect("kind", fields, True)
    assert not ahead.launched("other", fields)


def test_captured_graphs_serve_texts_that_come_and_go(folders: Any) -> None:
    eager, captured = (Engine(folders("mistral"), device=PLAIN) for _ in range(2))
    work = captured._work = GraphWork(captured)
    settings = (Sampling(), Sampling(0.9, seed=5), Sampling())
    for sampling, draft in zip(settings, (None, None, "E5M3"), strict=True):
        texts = [
            list(one.tokens(TEXT[:20], max_new_tokens=20, sampling=sampling, draft=draft)) for one in (eager, captured)
        ]
        assert texts[0] == texts[1]
    assert work.replays > 40
    switched = []
    for one in (eager, captured):
        made, text = one.tokens(TEXT[:20], max_new_tokens=30), []
        for number, token in enumerate(made):
            text.append(token)
            one.precision = Precision.E5M4 if number in (9, 10, 11, 20) else Precision.E5M8
        switched.append(text)
    assert switched[0] == switched[1]
    for one in (eager, captured):
        one.precision = Precision.E5M8
    kinds = len(work._captured)
    captured.drop_to("E5M4")
    captured.raise_to("E5M8")
    assert list(captured.tokens(TEXT[:20], max_new_tokens=3)) == texts[0][:3]
    assert len(work._captured) < kinds  # those of planes that went, gone with them
    scheduler = Scheduler(captured, most_sequences=7)
    running = [scheduler.submit(Request(TEXT[number:], 9)) for number in range(5, 12)]
    found = [[token.id for token in text] for text in running]
    scheduler.close()
    assert found == [list(eager.tokens(TEXT[number:], max_new_tokens=9)) for number in range(5, 12)]


def test_graphs_are_forgotten_together(folders: Any) -> None:
    engine = Engine(folders("llama"), device=PLAIN)
    work = engine._work = GraphWork(engine)
    for width in (Precision.E5M8, Precision.E5M4):
        engine.precision = width
        list(engine.tokens(TEXT[:5], max_new_tokens=3))
    work._pool = "shared"
    engine.precision = Precision.E5M3
    list(engine.tokens(TEXT[:5], max_new_tokens=3))
    assert {kind.widths[1] for kind in work._captured} == {3, 4, 8}
    assert work._pool == "shared"
    engine.drop_to("E5M4")
    list(engine.tokens(TEXT[:5], max_new_tokens=3, sampling=Sampling(0.9, seed=1)))
    assert {(kind.widths[1], kind.drawn) for kind in work._captured} == {(3, True)}
    assert work._pool is None


class ShortWork(GraphWork):
    """Has no memory for the first graphs."""

    failures = 3

    def _capture(self, kind: Kind, inputs: torch.Tensor) -> None:
        if self.failures:
            self.failures -= 1
            try:
                raise torch.OutOfMemoryError("out of memory")
            finally:
                if self.failures == 1:
                    raise RuntimeError("the capture was not begun")
        super()._capture(kind, inputs)


def test_texts_go_on_where_memory_is_short_for_graphs(
    folders: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Engine(folders("llama"), device=PLAIN)
    work = short._work = ShortWork(short)
    found, wanted = (list(one.tokens(TEXT[:5], max_new_tokens=12)) for one in (short, engine))
    assert found == wanted
    assert work.replays > 4
    work._captured.clear()
    monkeypatch.setattr(GraphWork, "_make_room", lambda work: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        list(short.tokens(TEXT[:5], max_new_tokens=12))
    device = torch.device("cuda")
    assert launches.captures(device)
    monkeypatch.setenv("OTARO_GRAPHS", "0")
    assert not launches.captures(device)


def test_a_prompt_without_logits_leaves_the_head_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    head, counts = engine._work._model.head, list[int]()  # type: ignore[attr-defined]
    multiply = head.multiply

    def counted(x: torch.Tensor, width: int) -> Any:
        counts.append(len(x))
        return multiply(x, width)

    monkeypatch.setattr(head, "multiply", counted)
    monkeypatch.setattr(engine._work, "prefill_tokens", 16)
    session, widths = engine.new_session(60), engine.weights.widths(Precision.E5M8)
    assert engine._work.logits(session, TEXT[:20], 0, widths, threads=1, rows=0).shape == (0, VOCABULARY)
    assert counts == []
    engine._work.logits(session, TEXT, 0, widths, threads=1, rows=3)
    assert counts == [3]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("emulation"))


@pytest.fixture
def emulated(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(library, monkeypatch)
    monkeypatch.setattr(matrices, "has_kernels", lambda device: True)
    yield
    monkeypatch.undo()
    for cache in (cuda._launch_plan, cuda._has_plan, ops._arranges):
        cache.cache_clear()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_by_the_kernels_themselves(folders: Any, dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    loaded = DeviceWeights(folders("qwen2"), device=device, dtype=dtype)
    work, session = DeviceWork(loaded.model), DeviceSession(loaded.model, 60)
    model = otaro.load(folders("qwen2"))
    for precision, count in ((Precision.E5M8, 1), (Precision.E5M3, MOST_ROWS)):
        model.set_precision(precision)
        with torch.no_grad():
            wanted = model(torch.tensor([TEXT[:count]])).logits[0].numpy()
        found = work.logits(session, TEXT[:count], 0, loaded.widths(precision), rows=count)
        assert abs(found - wanted).max() < (0.02 if dtype == torch.float16 else 0.1) * abs(wanted).max()


def test_what_cannot_run_is_said_in_a_sentence(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OtaroError, match="no NVIDIA GPU"):
        launches.choose("cuda")
    with pytest.raises(OtaroError, match="choose auto, cpu or cuda"):
        launches.choose("tpu")
    assert launches.choose("auto") == launches.choose("cpu") == "cpu"
    with pytest.raises(OtaroError, match="no NVIDIA GPU"):
        Engine(folders("llama"), device="cuda")
    assert Engine(folders("llama"), threads=1, device="auto").device == "cpu"
    folder = Engine(folders("llama"), "E5M3", threads=1).weights.folder
    sizes = {width: weights.device_bytes(folder, width) + weights.RESERVE for width in Precision}
    weights.check_memory(folder, Precision.E5M8, sizes[Precision.E5M8])
    with pytest.raises(OtaroError, match="E5M5 fits"):
        weights.check_memory(folder, Precision.E5M8, sizes[Precision.E5M6] - 1)
    with pytest.raises(OtaroError, match="not even"):
        weights.check_memory(folder, Precision.E5M8, 1000)


def test_commands_take_a_device(packed_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--prompt", "hello", "--max-new-tokens", "6"]
    answers = []
    for device in ("cpu", PLAIN):
        assert main(["generate", str(packed_llama), *text, "--device", device]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert main(["generate", str(packed_llama), *text, "--device", "cuda"]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
    assert main(["generate", str(packed_llama), *text, "--device", PLAIN, "--memory", "1GB"]) == 2
    for arguments, sentence in (
        (["generate", *text, "--device", "cuda:1", "--memory", "1GB"], "there is no device 'cuda:1'"),
        (["generate", *text, "--device", ""], "there is no device ''"),
        (["bench", "--device", "cuda", "--against", "llama.cpp"], "measured on the CPU"),
        (["generate", *text, "--device", "cuda", "--backend", "transformers"], "no NVIDIA GPU"),
    ):
        capsys.readouterr()
        assert main([arguments[0], str(packed_llama), *arguments[1:]]) == 2
        assert sentence in capsys.readouterr().err
    figures = tmp_path / "figures.json"
    sizes = ["--prompt-tokens", "20", "--new-tokens", "3", "--rounds", "1", "--precisions", "E5M4"]
    assert main(["bench", str(packed_llama), *sizes, "--device", PLAIN, "--json", str(figures)]) == 0
    assert json.loads(figures.read_text("utf-8"))["results"][0]["speed"]["decode"] > 0


def test_what_measures_a_gpu_runs(folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from experiments.table2 import run

    sizes = [
        "--shape",
        "tiny",
        "--device",
        PLAIN,
        "--tokens",
        "30",
        "--steps",
        "2",
        "--json",
        str(tmp_path / "table.json"),
    ]
    run.main(sizes)
    rows = json.loads((tmp_path / "table.json").read_text("utf-8"))["rows"]
    assert {row["name"] for row in rows} == {"FP16", *map(str, Precision)}
    assert all(row["share"] > 0 for row in rows)
    numpy.save(tmp_path / "tokens.npy", numpy.array(TEXT * 4))
    program = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "gpu_engine.py"))
    sizes = [
        "--device",
        PLAIN,
        "--prompt",
        "20",
        "--new",
        "6",
        "--windows",
        "1",
        "--tokens",
        str(tmp_path / "tokens.npy"),
    ]
    program["main"]([str(folders("llama")), *sizes, "--json", str(tmp_path / "engine.json")])
    report = json.loads((tmp_path / "engine.json").read_text("utf-8"))
    assert "error" not in json.dumps(report)
    assert report["speculation"]["same"]
    assert all(abs(width["difference"]) < 1e-4 for width in report["agreement"].values())
