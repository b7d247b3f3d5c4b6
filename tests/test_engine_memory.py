"""Memory as the system counts it: a cache that grows with the text, planes that go back when they are dropped."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import architectures
import pytest
import torch
from transformers import LlamaConfig

from otaro import ops
from otaro.engine import native
from otaro.engine.engine import Engine
from otaro.engine.native import Arena, Matrix, Model, matrix_size
from otaro.engine.session import session_size
from otaro.engine.weights import packed_size
from otaro.ops import cpu
from otaro.precision import Precision
from otaro.sefp import Format

counted = pytest.mark.skipif(
    sys.platform != "linux" or cpu.LIBRARY_VARIABLE in os.environ,
    reason="reads /proc, and a library for sanitizers maps no memory",
)
CONTEXT = 32768
MB = 1_000_000


def resident() -> int:
    fields = Path("/proc/self/smaps_rollup").read_text().split()
    return 1024 * int(fields[fields.index("Rss:") + 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many small matrices, and keys and values of 4 kB a token, 134 MB for the whole context."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 16, "head_dim": 32}
    config = LlamaConfig(**{**architectures.SMALL, **sizes, "max_position_embeddings": CONTEXT})
    return architectures.packed_model(config, tmp_path_factory.mktemp("memory"))


@counted
@pytest.mark.parametrize("kv_cache", ["float16", "E5M8"])
def test_the_cache_grows_with_the_text_and_shrinks_with_it(folder: Path, kv_cache: str) -> None:
    engine = Engine(folder, context=CONTEXT, threads=1, kv_cache=kv_cache)
    row = engine.memory["full_cache"] / engine.context
    assert engine.memory["full_cache"] > 70 * MB
    engine.logits([1] * 20)  # working memory is there now
    before, held = resident(), engine.memory["cache"]
    assert held < MB
    assert len(list(engine.tokens([1, 2, 3], max_new_tokens=2))) == 2
    assert resident() - before < MB
    for length in (500, 1000):
        next(engine.tokens([5] * length, max_new_tokens=1))
        assert length * row < engine.memory["cache"] < length * row + MB
        assert abs(resident() - before - (engine.memory["cache"] - held)) < MB
    next(engine.tokens([5] * 600, max_new_tokens=1))  # about as long: what is there is kept
    assert engine.memory["cache"] > 1000 * row
    expected = engine.logits([7] * 20)
    assert engine.memory["cache"] == held
    assert resident() - before < MB
    next(engine.tokens([5] * 300, max_new_tokens=1))  # over what was given back
    assert (engine.logits([7] * 20) == expected).all()


@counted
def test_dropped_widths_go_back_to_the_system(folder: Path) -> None:
    engine = Engine(folder, threads=1)
    assert engine.memory["weights"] == packed_size(engine.weights.folder, Precision.E5M8)
    expected = engine.logits([1, 2, 3], "E5M3")
    for width in ("E5M7", "E5M6", "E5M5", "E5M4", "E5M3"):
        before, held = resident(), engine.memory["weights"]
        engine.drop_to(width)
        dropped = held - engine.memory["weights"]
        assert dropped > 0.3 * MB
        assert engine.memory["weights"] == packed_size(engine.weights.folder, Precision(width))
        assert abs(before - resident() - dropped) < 0.2 * MB + 0.1 * dropped
    assert (engine.logits([1, 2, 3], "E5M3") == expected).all()
    engine.raise_to("E5M8")
    assert engine.memory["weights"] == packed_size(engine.weights.folder, Precision.E5M8)


@counted
def test_an_engine_that_is_gone_leaves_nothing(folder: Path) -> None:
    Engine(folder, threads=1)
    before = resident()
    for _ in range(4):
        engine = Engine(folder, threads=1)
        next(engine.tokens([5] * 500, max_new_tokens=1))
        taken = engine.memory["weights"] + engine.memory["cache"]
        del engine
    assert resident() - before < 0.5 * taken


def test_an_arena_lives_as_long_as_planes_in_it() -> None:
    weight = torch.randn(500, 700)
    format = Format()
    planes, _ = ops.pack(weight, format)
    x = torch.randn(3, 700)
    alone = Matrix(planes, weight.shape, format, threads=1)
    expected = [alone.multiply(x, precision) for precision in Precision]
    size = matrix_size(weight.shape, format, Precision.E5M8)
    assert size == alone.nbytes
    for room in (0, 1, size // 2, size, 2 * size):  # what has no place in it has memory of its own
        arena = Arena(room)
        matrices = [Matrix(planes, weight.shape, format, threads=1, arena=arena) for _ in range(2)]
        del arena
        matrices[0].drop_bit(8)
        for matrix in matrices[1:]:
            assert matrix.nbytes == size
            found = [matrix.multiply(x, precision) for precision in Precision]
            assert all(map(torch.equal, found, expected))


def test_sizes_told_beforehand_are_those_taken(folder: Path) -> None:
    for kv_cache in (None, Precision.E5M6):
        engine = Engine(folder, threads=2, context=100, kv_cache=kv_cache or "float16")
        list(engine.tokens([1, 2, 3], max_new_tokens=20, draft="E5M3"))
        bare = Model(engine.weights.model.shape)
        told = session_size(bare, engine.weights.folder.format, 100, cache=kv_cache, threads=2)
        assert told == (engine.memory["full_cache"], engine.memory["work"])


def test_sizes_that_cannot_be_are_refused(folder: Path) -> None:
    library = native.library()
    value, other, model = ctypes.c_int64(), ctypes.c_int64(), Engine(folder).weights.model
    format, out = ctypes.byref(cpu.c_format(Format())), ctypes.byref(value)
    argument, memory = 1, 7
    for rows, columns, mantissa in ((0, 1, 3), (1, 0, 3), (2**31 + 1, 1, 3), (2**31, 2**31, 3), (1, 1, 2), (1, 1, 9)):
        assert library.otaro_matrix_size(format, rows, columns, mantissa, out) == argument
    assert library.otaro_matrix_size(format, 1, 1, 3, None) == argument
    for nbytes in (-1, 2**62):
        assert library.otaro_arena_create(nbytes, out) == argument
    if cpu.LIBRARY_VARIABLE not in os.environ:
        assert library.otaro_arena_create(2**45, out) == memory
    good = {"group": 64, "context": 100, "mantissa": 0, "threads": 1}
    for name, number, error in (
        ("group", 63, argument),
        ("context", 0, argument),
        ("context", 2**31 + 1, argument),
        ("mantissa", 2, argument),
        ("threads", 0, argument),
        ("threads", 1025, argument),
        ("context", 2**31, 0),
    ):
        sizes = {**good, name: number}.values()
        assert library.otaro_size(model.handle, *sizes, out, ctypes.byref(other)) == error, (name, number)
    assert library.otaro_size(model.handle, *good.values(), None, None) == argument
