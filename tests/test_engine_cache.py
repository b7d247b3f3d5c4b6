"""Keys and values as SEFP codes: the bits, attention against a plain emulation, memory, and what is refused."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import architectures
import numpy
import pytest
import torch
from texts import Text
from transformers import DynamicCache

import otaro
from otaro import sefp
from otaro.cli import main
from otaro.engine import native
from otaro.engine.engine import Engine
from otaro.engine.native import round_keys
from otaro.errors import OtaroError
from otaro.ops import cpu
from otaro.precision import Precision
from otaro.sefp import Format

GROUP = 64
PROMPT = [5, 80, 3, 44, 17, 9, 60] * 6


def rounded(values: torch.Tensor, precision: Precision) -> torch.Tensor:
    """The same by the definition of the format, groups along the last dimension."""
    flat = values.reshape(-1, values.shape[-1])
    return sefp.decode(sefp.encode(flat, precision, Format(group_size=GROUP))).reshape(values.shape)


@pytest.mark.parametrize("precision", list(Precision), ids=str)
@pytest.mark.parametrize("dimension", [2, 12, 32, 34, 64, 80, 128, 1024])
def test_rows_have_the_bits_of_the_format_on_every_instruction_set(dimension: int, precision: Precision) -> None:
    random = torch.Generator().manual_seed(dimension)
    rows = torch.randn(40, dimension, generator=random) * 2.0 ** torch.randint(-18, 18, (40, 1), generator=random)
    rows[0], rows[1, ::2], rows[2] = 0, 0, -rows[2].abs()
    expected = rounded(rows, precision)
    for isa in cpu.isas():
        assert torch.equal(round_keys(rows, precision, isa=isa), expected), isa


class RoundedCache(DynamicCache):
    """Keys and values as a coded cache would give them back."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.precision = precision

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        keys, values = rounded(key_states, self.precision), rounded(value_states, self.precision)
        return super().update(keys, values, *rest, **named)


@pytest.fixture(scope="module", params=["wide heads", "grouped queries with a window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 80 dimensions, that is of two groups, and heads of 12 that share keys and see 9 positions."""
    if request.param == "wide heads":
        config = architectures.config("qwen3")
        config.head_dim = 80
        config.num_key_value_heads = config.num_attention_heads
    else:
        config = architectures.config("mistral")
        config.sliding_window = 9
    return architectures.packed_model(config, tmp_path_factory.mktemp("cache"))


def test_logits_agree_with_an_emulation(folder: Path) -> None:
    model = otaro.load(folder)
    chance = random.Random(0)
    prompts = [[chance.randrange(architectures.VOCABULARY) for _ in range(30)] for _ in range(8)]

    def emulated(prompt: list[int], cache: DynamicCache) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor([prompt]), past_key_values=cache).logits[0]
        return logits

    for precision in Precision:
        engine = Engine(folder, threads=2, kv_cache=precision)
        shares = []
        for prompt in prompts:
            plain = emulated(prompt, DynamicCache(config=model.config))
            expected = emulated(prompt, RoundedCache(precision))
            found = torch.from_numpy(engine.logits(prompt))
            shares.append(float((found - expected).norm() / (plain - expected).norm()))
        # A key that falls on the other side of a cell's border changes by a whole step: of some prompts one does, of
        # others none, so their mean counts, 0.26 at most. Other codes, or none, would give more than 1.
        assert statistics.mean(shares) < 0.4, precision


def test_threads_batches_and_repetition_change_no_bit(folder: Path) -> None:
    for precision in (Precision.E5M8, Precision.E5M3):
        engines = [Engine(folder, threads=threads, kv_cache=precision) for threads in (1, 2, 4, 4)]
        whole = [engine.logits(PROMPT) for engine in engines]
        assert all(numpy.array_equal(logits, whole[0]) for logits in whole)
        session = Text(engines[0].weights.model, 64, cache=precision)
        widths = engines[0].weights.widths(Precision.E5M8)
        for position, token in enumerate(PROMPT):
            assert numpy.array_equal(session.run([token], position, widths, threads=1)[0], whole[0][position])


def test_every_instruction_set_agrees_within_rounding(folder: Path) -> None:
    engine = Engine(folder, threads=1)
    widths = engine.weights.widths(Precision.E5M8)
    results = []
    for isa in cpu.isas():
        session = Text(engine.weights.model, 64, cache=Precision.E5M8, isa=isa)
        results.append(session.run(PROMPT, 0, widths, threads=1, logits=len(PROMPT)))
    for result in results[1:]:
        assert numpy.linalg.norm(result - results[0]) / numpy.linalg.norm(results[0]) < 2e-3


def test_a_cache_takes_the_memory_its_codes_need(folder: Path) -> None:
    shape = Engine(folder).weights.model.shape
    rows = 2 * shape.layers * shape.kv_heads * 64  # positions, a whole number of 16
    blocks, groups = -(-shape.head_dimension // 32), -(-shape.head_dimension // GROUP)
    for precision in Precision:
        memory = Engine(folder, context=60, kv_cache=precision).memory
        assert memory["full_cache"] == rows * (blocks * 4 * (1 + precision.mantissa) + groups)
    assert Engine(folder, context=60).memory["full_cache"] == rows * 2 * (-(-shape.head_dimension // 16) * 16)
    assert Engine(folder, context=60).kv_cache is None


def test_sizes_are_checked_before_memory_is_touched(folder: Path) -> None:
    library = native.library()
    x, y = numpy.zeros((3, 64), dtype=numpy.float32), numpy.zeros((3, 64), dtype=numpy.float32)
    good: dict[str, Any] = {
        "mantissa": 4,
        "x": x.ctypes.data,
        "x_bytes": x.nbytes,
        "rows": 3,
        "dimension": 64,
        "y": y.ctypes.data,
        "y_bytes": y.nbytes,
        "isa": 0,
    }
    assert library.otaro_cache_round(*good.values()) == 0
    argument, buffer, isa = 1, 2, 5
    for name, value, error in (
        ("mantissa", 0, argument),
        ("mantissa", 9, argument),
        ("x", None, argument),
        ("y", None, argument),
        ("x_bytes", x.nbytes - 1, buffer),
        ("y_bytes", y.nbytes - 1, buffer),
        ("rows", -1, argument),
        ("rows", 2**62, argument),
        ("dimension", 0, argument),
        ("dimension", 1025, argument),
        ("isa", 99, isa),
    ):
        assert library.otaro_cache_round(*{**good, name: value}.values()) == error, (name, value)
    model = Engine(folder).weights.model
    for mantissa in (-1, 1, 2, 9, 2**30):
        handle = native.ctypes.c_void_p()
        created = library.otaro_session_create(model.handle, 64, mantissa, native.ctypes.byref(handle))
        assert created == argument
        assert handle.value is None
    with pytest.raises(OtaroError, match="not enough memory"):
        Text(model, 2**31, cache=Precision.E5M8)
    with pytest.raises(OtaroError, match="cannot be kept as int8: choose float16 or E5M8"):
        Engine(folder, kv_cache="int8")


def test_the_command_line_takes_it(packed_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(packed_llama), "--prompt", "hello", "--max-new-tokens", "4"]
    assert main([*arguments, "--kv-cache", "e5m8"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--kv-cache", "E5M9"]) == 2
    assert "cannot be kept as E5M9" in capsys.readouterr().err
    assert main([*arguments, "--kv-cache", "E5M8", "--backend", "transformers"]) == 2
    assert "--kv-cache needs the native engine" in capsys.readouterr().err
