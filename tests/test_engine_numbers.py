"""Numbers that go in: of any kind and size, refused in a sentence or taken as they are; and logits that are none."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import architectures
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import Text

import otaro
from otaro import ops
from otaro.cli import main
from otaro.engine.engine import Engine
from otaro.engine.native import Matrix
from otaro.engine.sampling import Sampling, c_sampling, sample
from otaro.engine.session import Step, Work
from otaro.errors import FormatError, OtaroError
from otaro.ops import cpu
from otaro.precision import Precision
from otaro.sefp import Format

PROMPT = [5, 80, 3, 44, 17, 9, 60]
FEW = 4

integers = st.one_of(
    st.integers(-3, FEW),
    st.integers(),
    st.sampled_from([1, 8, 16, 31, 32, 63, 64, 128, 20_000]).flatmap(
        lambda bits: st.integers(-2, 2).map(lambda near: 2**bits + near)
    ),
)
"""Beside the borders of what C has: 2**32 + 1 is 1 there."""
odd_numbers = st.one_of(
    integers,
    integers.map(operator.neg),
    st.booleans(),
    st.floats(),
    st.integers(0, FEW).map(float),
    st.sampled_from([numpy.int8, numpy.uint8, numpy.int64, numpy.uint64, numpy.float32]).flatmap(
        lambda kind: st.integers(0, FEW).map(kind)
    ),
    st.sampled_from([None, "3", b"3", Decimal(3), Fraction(3), 3j, [3], numpy.array([3]), numpy.bool_(True), object()]),
    st.integers(0, FEW).map(torch.tensor),
)


def plain(value: Any) -> int | None:
    """The integer that a value is, if it is one at all."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def taken_or_refused(value: Any, call: Callable[[Any], Any], least: int, most: int) -> None:
    """What is within bounds is taken for what it is, all else is one sentence."""
    number = plain(value)
    if number is not None and least <= number <= most:
        assert call(value) == call(number)
    else:
        with pytest.raises(OtaroError) as refusal:
            call(value)
        assert "\n" not in str(refusal.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architectures.packed_model(architectures.config("llama"), tmp_path_factory.mktemp("numbers"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, threads=1)


@pytest.mark.parametrize("argument, most", [("threads", 1024), ("context", 64)])
def test_odd_numbers_for_an_engine(folder: Path, argument: str, most: int) -> None:
    def use(value: Any) -> int:
        return int(getattr(Engine(folder, **{"threads": 1, argument: value}), argument))

    @settings(max_examples=40, deadline=None)
    @given(odd_numbers.filter(lambda value: value is not None))
    def check(value: Any) -> None:
        taken_or_refused(value, use, 1, most)

    check()


def test_odd_numbers_for_a_text(engine: Engine) -> None:
    def text(prompt: Any = PROMPT, **options: Any) -> list[int]:
        return list(engine.tokens(prompt, **{"max_new_tokens": 3, **options}))

    def run(**options: Any) -> list[float]:
        engine.logits(PROMPT)  # is what the cache holds
        widths = engine.weights.widths(Precision.E5M8)
        return engine.run(**{"tokens": PROMPT, "position": 0, "widths": widths, "logits": 1, **options})[0].tolist()

    calls: dict[str, tuple[Callable[[Any], Any], int, int]] = {
        "max_new_tokens": (lambda value: text(max_new_tokens=value), 1, engine.context - len(PROMPT)),
        "a token": (lambda value: text([5, value, 3]), 0, architectures.VOCABULARY - 1),
        "a token of logits": (lambda value: engine.logits([5, value]).tolist(), 0, architectures.VOCABULARY - 1),
        "an end": (lambda value: text(end=[value]), -(10**10_000), 10**10_000),
        "a position": (lambda value: run(position=value), 0, len(PROMPT)),
        "rows of logits": (lambda value: run(logits=value), 1, len(PROMPT)),
    }

    @settings(max_examples=60, deadline=None)
    @given(odd_numbers, st.sampled_from(sorted(calls)))
    def check(value: Any, name: str) -> None:
        call, least, most = calls[name]
        if name == "rows of logits" and plain(value) == 0:
            return  # none: there is no first one
        if name == "a position" and plain(value) is not None and len(PROMPT) < plain(value) <= engine.context:
            with pytest.raises((OtaroError, ValueError), match="gap|do not fit"):
                call(value)
            return
        taken_or_refused(value, call, least, most)

    check()


@settings(max_examples=100, deadline=None)
@given(odd_numbers, st.sampled_from(["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"]))
def test_odd_numbers_for_sampling(value: Any, name: str) -> None:
    """Either a sentence, or a token from logits that are as far apart as logits get."""
    logits = numpy.array([3e38, -3e38, 0, 1, 2], dtype=numpy.float32)
    options = {"temperature": 0.8, "seed": 1, name: value}
    refusals: list[str] = []
    try:
        assert sample(c_sampling(Sampling(**options)), logits, [0, 1])[0] in range(5)
    except OtaroError as refusal:
        refusals.append(str(refusal))
    assert all(name in refusal and "\n" not in refusal for refusal in refusals)


@pytest.mark.parametrize("tokens", ["text", b"bytes", 7, None, [[1, 2]], torch.tensor([[1, 2]]), ["a"], [1.5], {}])
def test_what_is_not_a_list_of_tokens_is_said(engine: Engine, tokens: Any) -> None:
    for call in (lambda: engine.tokens(tokens, max_new_tokens=2), lambda: engine.logits(tokens)):
        with pytest.raises(OtaroError) as refusal:
            call()
        if isinstance(tokens, str | bytes):
            assert "use generate for a text" in str(refusal.value)


def test_no_integer_is_cut_on_its_way_into_the_library(engine: Engine) -> None:
    planes, _ = ops.pack(torch.randn(4, 64), Format())
    matrix = Matrix(planes, (4, 64), Format(), threads=1)
    for threads in (2**32 + 1, -(2**32) + 1, 2**64 + 1):
        with pytest.raises(ctypes.ArgumentError, match="does not fit"):
            matrix.multiply(torch.zeros(1, 64), Precision.E5M3, threads=threads)
        with pytest.raises(ctypes.ArgumentError, match="does not fit"):
            Text(engine.weights.model, 8).run([1], 0, engine.weights.widths(Precision.E5M3), threads=threads)


# ---- numbers that are none ------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"sampling": Sampling(0.8, seed=1)},
    "guessed": {"draft": "E5M3"},
    "penalized": {"sampling": Sampling(repetition_penalty=1.2)},
}


@pytest.mark.parametrize("number", [numpy.nan, numpy.inf, -numpy.inf])
@pytest.mark.parametrize("place", [0, 50, 1024, 1029])
def test_logits_that_are_not_finite_are_refused(number: float, place: int) -> None:
    logits = numpy.zeros(1030, dtype=numpy.float32)
    logits[place] = number
    for isa in cpu.isas():
        for sampling in (Sampling(), Sampling(0.8, seed=1), Sampling(repetition_penalty=1.2)):
            with pytest.raises(OtaroError, match="logits are not finite"):
                sample(c_sampling(sampling), logits, [50], isa=isa)


@pytest.mark.parametrize("way", WAYS)
def test_logits_that_are_not_finite_end_a_text(engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    original = Work.run
    not_finite = 3

    def spoil(work: Work, steps: list[Step], **named: Any) -> None:
        original(work, steps, **named)
        steps[0].failed = not_finite if steps[0].position > 0 else 0  # the prompt is read without trouble

    with monkeypatch.context() as patch:
        patch.setattr(Work, "run", spoil)
        text = engine.tokens(PROMPT, max_new_tokens=9, **WAYS[way])
        next(text)
        with pytest.raises(OtaroError, match="logits are not finite"):
            list(text)
    assert len(list(engine.tokens(PROMPT, max_new_tokens=9))) == 9


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Path]:
    """A model whose norm holds a number, packed."""

    def make(name: str, value: float) -> Path:
        path = tmp_path_factory.mktemp("overflow")
        model = architectures.random_model("llama")
        with torch.no_grad():
            model.get_parameter(name)[3] = value
        model.save_pretrained(path / "model")
        otaro.pack(path / "model", path / "packed")
        return path / "packed"

    return make


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.post_attention_layernorm.weight"])
def test_a_model_that_overflows_says_so(overflowing: Callable[[str, float], Path], name: str) -> None:
    engine = Engine(overflowing(name, 3e38), threads=1)
    for way in WAYS.values():
        with pytest.raises(OtaroError, match="logits are not finite"):
            list(engine.tokens(PROMPT, max_new_tokens=4, **way))


def test_a_norm_that_is_not_finite_is_named(
    overflowing: Callable[[str, float], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = overflowing("model.norm.weight", float("nan"))
    with pytest.raises(FormatError, match="model.norm.weight holds numbers that are not finite"):
        Engine(folder)
    capsys.readouterr()
    assert main(["generate", str(folder), "--prompt", "hello"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("fine", [False, True], ids=["8 bits", "16 bits"])
def test_activations_that_are_not_finite_stay_so(isa: str, fine: bool) -> None:
    planes, _ = ops.pack(torch.randn(20, 96), Format(group_size=32))
    matrix = Matrix(planes, (20, 96), Format(group_size=32), threads=1)
    for number in (float("nan"), float("inf"), -float("inf")):
        for place in (0, 7, 31, 95):
            x = torch.randn(3, 96)
            x[1, place] = number
            y = matrix.multiply(x, Precision.E5M5, fine=fine, isa=isa)
            assert not y[1].isfinite().any()
            assert y[[0, 2]].isfinite().all()
