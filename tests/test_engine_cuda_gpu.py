"""The engine on a GPU: `pytest -m gpu tests/test_engine_cuda_gpu.py` on a machine with one of NVIDIA's."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import architectures
import numpy
import pytest
import torch

from otaro.engine.cuda import fused, launches, plain
from otaro.engine.cuda.rows import DeviceSession, Rows
from otaro.engine.cuda.work import DeviceWork
from otaro.engine.engine import Engine
from otaro.engine.sampling import Sampling
from otaro.engine.scheduler import Request, Scheduler
from otaro.ops import cpu
from otaro.precision import Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(launches.unusable() is not None, reason=str(launches.unusable())),
]
CUDA, PLAIN = launches.CUDA, launches.PLAIN
NAMES = ("llama", "llama-tied", "qwen2", "qwen3", "mistral", "mixtral", "qwen3-moe")
TEXT = [(61 * number) % architectures.VOCABULARY for number in range(60)]
"""A text in which no token's experts are nearly as likely as others: half floats would choose differently."""
BUDGET = 0.02
"""Of the largest logit: activations are float16 there and float32 here."""


def packed(name: str, folder: Path, **changes: Any) -> Path:
    config = architectures.config(name)
    for setting, value in {"max_position_embeddings": 1024, **changes}.items():
        setattr(config, setting, value)
    return architectures.packed_model(config, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, device=CUDA)


def assert_near(found: Any, wanted: Any, budget: float = BUDGET) -> None:
    assert numpy.isfinite(found).all()
    assert abs(found - wanted).max() < budget * abs(wanted).max()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    place = packed(name, tmp_path, **({"sliding_window": 9} if name == "mistral" else {}))
    gpu, plainly = Engine(place, device=CUDA), Engine(place, device=PLAIN)
    for precision in (Precision.E5M8, Precision.E5M4, Precision.E5M3):
        wanted = plainly.logits(TEXT, precision)
        assert_near(gpu.logits(TEXT, precision), wanted)  # as a prompt
        widths, pieces, position = gpu.weights.widths(precision), [], 0
        for count in (17, 1, 1, 1, 5, 16, 19):  # as batches: captured, and then replayed
            pieces.append(gpu.run(TEXT[position : position + count], position, widths, logits=count))
            position += count
        assert_near(numpy.concatenate(pieces), wanted)


def test_replayed_graphs_give_the_bits_of_what_was_captured(engine: Engine) -> None:
    model = engine.weights.model
    widths = engine.weights.widths(Precision.E5M5)
    results = []
    for graphs in (False, True):
        work = DeviceWork(model, graphs=graphs)  # type: ignore[arg-type]
        session = DeviceSession(model, 400)  # type: ignore[arg-type]
        rows = [work.logits(session, TEXT[:40], 0, widths)]
        for place, token in enumerate(itertools.islice(itertools.cycle(TEXT), 200), 40):  # over a stretch's end
            rows.append(work.logits(session, [token], place, widths))
        results.append(numpy.concatenate(rows))
    assert numpy.array_equal(*results)


def test_guesses_change_no_token(engine: Engine) -> None:
    for sampling in (Sampling(), Sampling(0.8, top_k=20, top_p=0.9, seed=3), Sampling(1.2, seed=1)):
        alone = list(engine.tokens(TEXT, max_new_tokens=200, sampling=sampling))
        assert list(engine.tokens(TEXT, max_new_tokens=200, sampling=sampling, draft="E5M3")) == alone
        assert engine.speculation.checks < 200


def test_steps_that_are_launched_ahead_change_no_token(engine: Engine) -> None:
    def tokens(sampling: Sampling) -> list[int]:
        text = []
        for number, token in enumerate(engine.tokens(TEXT, max_new_tokens=150, sampling=sampling)):
            text.append(token)
            engine.precision = Precision.E5M4 if 40 <= number < 60 or number in (70, 90) else Precision.E5M8
        return text

    for sampling in (Sampling(), Sampling(0.9, top_p=0.9, seed=7)):
        captured = tokens(sampling)
        work, engine._work = engine._work, DeviceWork(engine.weights.model, graphs=False)  # type: ignore[arg-type]
        try:
            assert tokens(sampling) == captured
        finally:
            engine._work = work


def test_up_to_eight_texts_are_the_same_to_the_bit_as_alone(engine: Engine) -> None:
    work = engine._work
    widths = engine.weights.widths(Precision.E5M4)
    sessions = [engine.new_session(300) for _ in range(8)]
    for number, session in enumerate(sessions):
        work.logits(session, TEXT[: 20 + 3 * number], 0, widths, threads=1)
    from otaro.engine.session import Step

    def steps(some: list[Any]) -> list[Step]:
        token = numpy.array([11], dtype=numpy.int32)
        return [Step(session, token, 20 + 3 * sessions.index(session), widths) for session in some]

    for _ in range(2):  # run as it is, and replayed
        together = steps(sessions)
        work.run(together, threads=1)
        for step in together:
            (single,) = steps([step.session])
            work.run([single], threads=1)
            assert numpy.array_equal(step.logits, single.logits)


@pytest.mark.parametrize("cache", ["E5M8", "E5M6", "E5M4"])
def test_keys_and_values_in_codes(folder: Path, cache: str) -> None:
    gpu, plainly = (Engine(folder, device=device, kv_cache=cache) for device in (CUDA, PLAIN))
    long = [*TEXT, *TEXT, *TEXT]
    wanted, found = plainly.logits(long), gpu.logits(long)
    assert_near(found, wanted, 0.05)
    widths = gpu.weights.widths(Precision.E5M8)
    steps = [gpu.run([token], place, widths) for place, token in enumerate(long)]
    assert_near(numpy.concatenate(steps), wanted, 0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads, dimension, window", [(9, 3, 64, 0), (32, 8, 128, 0), (4, 4, 80, 100)])
def test_attention_agrees_with_plain_torch(
    heads: int, kv_heads: int, dimension: int, window: int, dtype: torch.dtype
) -> None:
    from otaro.engine.cuda.matrices import DenseMatrix
    from otaro.engine.cuda.model import DeviceModel, Layer
    from otaro.engine.shape import Shape

    device = launches.torch_device(CUDA)
    frequency = tuple(1e4 ** (-2 * i / dimension) for i in range(dimension // 2))
    shape = Shape(2, 64, 80, heads, kv_heads, dimension, 99, 1e-5, frequency, 1.0, (window, window))
    key, value = heads * dimension, (heads + kv_heads) * dimension
    columns = value + kv_heads * dimension
    product = DenseMatrix(torch.zeros(columns, 64, device=device), (0, key, value))
    norm = torch.ones(64, device=device)
    layer = Layer(product, product, (product, product), norm, norm, window=window)
    model = DeviceModel(shape, [layer, layer], product, product, norm, dtype, {})
    positions = [0, 127, 128, 300, 1999, -1]
    for cache in (None, Precision.E5M8, Precision.E5M4):
        outcomes = []
        for kind in (fused, plain):
            torch.manual_seed(0)
            sessions = []
            for position in positions:
                session = DeviceSession(model, 4000, cache=cache)
                session.reserve(max(position, 0) + 1)
                held = torch.randn(2, 2, kv_heads, session.capacity, dimension, device=device)
                encoded = plain.encode(held.to(dtype) if cache is None else held, session.layout)
                for part, own in zip(session.parts, encoded, strict=True):
                    part[:] = own
                sessions.append(session)
            qkv = torch.randn(len(positions), columns, device=device).to(dtype)
            places = torch.tensor([[one.cache.data_ptr() for one in sessions], [one.capacity for one in sessions]])
            rows = Rows(
                torch.zeros(len(positions), dtype=torch.int64, device=device),
                torch.tensor(positions, device=device),
                places.to(device),
                sessions,
                sessions[0].layout,
                16,
            )
            query = kind.rotate(model, layer, 1, qkv, rows)
            outcomes.append((query, kind.attend(model, layer, 1, query, rows), sessions))
            for row in range(len(positions) - 1) if kind is fused else ():  # alone, in as few launches as can be
                own = Rows(
                    rows.tokens[:1],
                    rows.positions[row : row + 1],
                    rows.places[:, row : row + 1].contiguous(),
                    [],
                    rows.layout,
                    16,
                )
                assert torch.equal(fused.mix(model, layer, 1, qkv[row : row + 1], own)[0], outcomes[-1][1][row])
        (query, mixed, held), (wanted_query, wanted, others) = outcomes
        budget = 2e-3 if dtype == torch.float16 else 2e-2
        for found, expected in ((query, wanted_query), (mixed, wanted)):
            error = (found[:-1].float() - expected[:-1].float()).abs().max()
            assert float(error) <= budget * float(expected.abs().max())
        for one, other in zip(held, others, strict=True):
            assert float((one.cache != other.cache).float().mean()) < 1e-3


def test_planes_come_and_go_in_the_memory_of_the_device(tmp_path: Path) -> None:
    place = packed("llama", tmp_path, hidden_size=512, intermediate_size=2048, vocab_size=4096, num_hidden_layers=8)
    engine = Engine(place, device=CUDA)
    wide, narrow = engine.logits(TEXT, "E5M8"), engine.logits(TEXT, "E5M3")
    tokens = list(engine.tokens(TEXT, max_new_tokens=20))
    before = torch.cuda.memory_allocated()
    engine.drop_to("E5M3")
    freed = before - torch.cuda.memory_allocated()
    assert freed > 0.4 * engine.memory["weights"]
    assert numpy.array_equal(engine.logits(TEXT), narrow)
    list(engine.tokens(TEXT, max_new_tokens=20))
    engine.raise_to("E5M8")
    assert numpy.array_equal(engine.logits(TEXT), wide)
    assert list(engine.tokens(TEXT, max_new_tokens=20)) == tokens


def test_graphs_of_experts_after_planes_came_and_went(tmp_path: Path) -> None:
    engine = Engine(packed("mixtral", tmp_path), device=CUDA)
    wide = list(engine.tokens(TEXT, max_new_tokens=20))
    engine.drop_to("E5M3")
    narrow = list(engine.tokens(TEXT, max_new_tokens=20))
    engine.raise_to("E5M8")
    assert list(engine.tokens(TEXT, max_new_tokens=20)) == wide
    engine.drop_to("E5M3")
    assert list(engine.tokens(TEXT, max_new_tokens=20)) == narrow


def test_planes_join_while_texts_run_and_graphs_are_captured(folder: Path) -> None:
    engine = Engine(folder, device=CUDA, progressive=True)
    texts = [list(engine.tokens(TEXT, max_new_tokens=60, sampling=Sampling(0.7, seed=seed))) for seed in range(3)]
    engine.finish_loading()
    assert engine.width == Precision.E5M8
    assert all(len(text) == 60 for text in texts)


def test_many_texts_beside_one_of_the_engines_own(engine: Engine) -> None:
    engine.precision = Precision.E5M8
    own: list[int] = []
    thread = threading.Thread(target=lambda: own.extend(engine.tokens(TEXT, max_new_tokens=100)))
    scheduler = Scheduler(engine, most_sequences=16)
    thread.start()
    widths = list(Precision)
    running = [
        scheduler.submit(Request(TEXT[number:], 50, Sampling(0.5 * (number % 2), seed=number), widths[number % 6]))
        for number in range(24)
    ]
    found = [[token.id for token in text] for text in running]
    thread.join()
    scheduler.close()
    assert [len(text) for text in found] == [50] * 24
    assert own == list(engine.tokens(TEXT, max_new_tokens=100))


@pytest.mark.skipif(cpu.available() is not None, reason="needs the native core")
def test_tokens_are_near_those_of_the_native_engine(engine: Engine, folder: Path) -> None:
    native = Engine(folder)
    found, wanted = (list(one.tokens(TEXT, max_new_tokens=12)) for one in (engine, native))
    assert found[0] == wanted[0]
