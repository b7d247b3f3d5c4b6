"""Picking tokens: the native code against a plain reference, over settings, ties and logits of all kinds; seeds."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray

from otaro.engine import native
from otaro.engine.sampling import Sampling, c_sampling, sample
from otaro.errors import OtaroError
from otaro.ops import cpu

Weights = NDArray[numpy.float64]
CLOSE = 1e-5
"""Of the whole: how near a draw may be to the border between two tokens and still fall on either side."""


# ---- the reference ---------------------------------------------------------------------------------------------------


def penalized(logits: Weights, history: Sequence[int], penalty: float) -> Weights:
    result = logits.copy()
    seen = numpy.unique(numpy.array(history, dtype=numpy.int64))
    result[seen] = numpy.where(result[seen] > 0, result[seen] / penalty, result[seen] * penalty)
    return result


def distribution(sampling: Sampling, logits: Weights, history: Sequence[int] = ()) -> Weights:
    """The probability of every token, by sorting all of them."""
    scores = penalized(logits.astype(numpy.float64), history, sampling.repetition_penalty)
    if sampling.temperature == 0:
        certain = numpy.zeros(len(scores))
        certain[scores.argmax()] = 1.0
        return certain
    with numpy.errstate(over="ignore"):
        weights = numpy.exp((scores - scores.max()) / sampling.temperature)
    order = numpy.argsort(-weights, kind="stable")
    if sampling.top_k > 0:
        weights[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        sums = numpy.cumsum(weights[order])
        weights[order[int(numpy.searchsorted(sums, sampling.top_p * sums[-1])) + 1 :]] = 0
    weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()


def number(seed: int, position: int) -> float:
    """The random number of a position, by splitmix64."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mixed(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        return value ^ value >> 31

    return (mixed(mixed(seed + golden & mask) + (position + 1) * golden & mask) >> 11) / 2**53


def allowed(probabilities: Weights, draw: float) -> set[int]:
    """The tokens that a draw may fall on: one, or two where it lies on a border."""
    sums = numpy.cumsum(probabilities)
    found = {int(numpy.searchsorted(sums, (draw + shift) * sums[-1], side="right")) for shift in (-CLOSE, 0, CLOSE)}
    return {min(max(token, 0), len(sums) - 1) for token in found}


def picked(sampling: Sampling, logits: Any, history: Sequence[int] = (), **options: Any) -> int:
    return sample(c_sampling(sampling), numpy.asarray(logits, dtype=numpy.float32), history, **options)[0]


# ---- against it ------------------------------------------------------------------------------------------------------

SETTINGS = [
    Sampling(1.0),
    Sampling(0.7, top_p=0.95),
    Sampling(1.3, top_k=1),
    Sampling(1.3, top_k=7),
    Sampling(0.5, top_k=50, top_p=0.5),
    Sampling(2.0, top_p=0.999),
    Sampling(2.0, top_p=1e-9),
    Sampling(1.0, min_p=0.1),
    Sampling(1.0, min_p=1.0),
    Sampling(1.0, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
    Sampling(0.8, repetition_penalty=0.7),
    Sampling(1e-6),
    Sampling(100.0, top_k=10**9),
]


def logits_of(kind: str, size: int, seed: int) -> Weights:
    chance = numpy.random.default_rng(seed)
    rows = {
        "normal": lambda: chance.standard_normal(size),
        "peaked": lambda: 4 * chance.standard_normal(size) + 12 * (chance.random(size) < 5 / size),
        "ties": lambda: chance.integers(-3, 3, size).astype(numpy.float64),
        "equal": lambda: numpy.full(size, -2.5),
        "wide": lambda: chance.standard_normal(size) * 10.0 ** chance.integers(-3, 4),
    }
    return rows[kind]().astype(numpy.float32)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "peaked", "ties", "equal", "wide"])
def test_draws_are_those_of_the_reference(kind: str, sampling: Sampling) -> None:
    chance = random.Random(kind)
    for seed, size in enumerate((1, 2, 15, 16, 17, 99, 1024, 1025, 5003)):
        logits = logits_of(kind, size, seed)
        history = [chance.randrange(size) for _ in range(chance.choice((0, 5, 200)))]
        probabilities = distribution(sampling, logits, history)
        for trial in range(12):
            drawn = Sampling(**{**vars(sampling), "seed": chance.randrange(2**64)})
            position = chance.choice((0, trial, 2**40 + trial))
            token = picked(drawn, logits, history, position=position)
            assert drawn.seed is not None
            assert token in allowed(probabilities, number(drawn.seed, position)), (size, drawn, position)
            others = {picked(drawn, logits, history, position=position, isa=isa) for isa in cpu.isas()}
            assert others == {token}


def test_a_share_next_to_all_keeps_all_that_weighs_anything() -> None:
    """By rounding even the sum of all weights may fall short of it: there is nothing to cut then."""
    for trial in range(40):
        logits = 3 * logits_of("normal", 49152, trial)
        for share in (1 - 1e-8, 1 - 1e-9, 0.9999999999999999):
            sampling = Sampling(2.0, top_p=share, seed=trial)
            token = picked(sampling, logits)
            assert {picked(sampling, logits, isa=isa) for isa in cpu.isas()} == {token}
            assert token in allowed(distribution(sampling, logits), number(trial, 0))


def test_what_is_cut_off_is_never_drawn_and_what_is_kept_is() -> None:
    logits = numpy.array([2.0, 1.0, 0.0, -1.0, 3.0], dtype=numpy.float32)
    for sampling, kept in (
        (Sampling(1.0, top_k=2), {4, 0}),
        (Sampling(1.0, top_p=0.6), {4}),
        (Sampling(1.0, top_p=0.7), {4, 0}),
        (Sampling(1.0, min_p=0.1), {4, 0, 1}),
    ):
        drawn = {picked(Sampling(**{**vars(sampling), "seed": seed}), logits) for seed in range(400)}
        assert drawn == kept
    # Of equal tokens the first are kept.
    ties = numpy.array([1.0, 5.0, 5.0, 5.0, 5.0, 1.0], dtype=numpy.float32)
    for sampling, kept in ((Sampling(1.0, top_k=2), {1, 2}), (Sampling(1.0, top_p=0.7), {1, 2, 3})):
        assert {picked(Sampling(**{**vars(sampling), "seed": seed}), ties) for seed in range(200)} == kept
    # Cut twice, within the same tie.
    both = Sampling(1.0, top_k=3, top_p=0.5)
    assert {picked(Sampling(**{**vars(both), "seed": seed}), ties) for seed in range(200)} == {1, 2}


def test_draws_have_the_shares_that_they_should() -> None:
    logits = numpy.array([2.0, 1.0, 0.0, -1.0, 3.0], dtype=numpy.float32)
    sampling = Sampling(1.0, seed=0)
    counts = numpy.bincount([picked(sampling, logits, position=place) for place in range(4000)], minlength=5)
    expected = distribution(sampling, logits)
    assert counts / 4000 == pytest.approx(expected, abs=4 * float(numpy.sqrt(0.25 / 4000)))


def test_the_likeliest_is_the_first_of_equal_ones_wherever_it_lies() -> None:
    chance = numpy.random.default_rng(1)
    for size in (1, 7, 16, 1023, 1024, 1025, 3000):
        for _ in range(5):
            logits = chance.integers(-9, 9, size).astype(numpy.float32)
            for isa in cpu.isas():
                assert picked(Sampling(), logits, isa=isa) == int(logits.argmax())
                assert picked(Sampling(2.0, top_k=1), logits, isa=isa) == int(logits.argmax())


def test_a_penalty_counts_once_and_moves_what_was_said() -> None:
    logits = numpy.array([2.0, 1.0, 0.0, -1.0, 3.0], dtype=numpy.float32)
    assert picked(Sampling(repetition_penalty=2.0), logits, [4]) == 0
    assert picked(Sampling(repetition_penalty=1.4), logits, [4] * 9) == 4
    assert picked(Sampling(repetition_penalty=2.0), logits, [4, 0, 0, 4]) == 4
    assert picked(Sampling(repetition_penalty=100.0), -logits - 5, [3]) == 2
    huge = numpy.array([3e38, -3e38, 0.0], dtype=numpy.float32)
    for penalty in (0.01, 100.0):
        for temperature in (0.0, 1.0, 1e-300, 1e35):
            assert picked(Sampling(temperature, repetition_penalty=penalty, seed=1), huge, [0, 1, 2]) == 0


def test_seeds_and_positions_give_numbers_of_their_own() -> None:
    logits = numpy.zeros(1000, dtype=numpy.float32)

    def text(seed: int | None) -> list[int]:
        sampling = c_sampling(Sampling(1.0, seed=seed))
        return [sample(sampling, logits, position=place)[0] for place in range(50)]

    assert text(1) == text(1)
    assert len({tuple(text(seed)) for seed in (0, 1, 2, 2**64 - 1, None, None)}) == 6
    assert len(set(text(5))) > 40
    # Neighbouring seeds are not the same numbers moved along.
    first, second = text(7), text(8)
    assert all(first[shift:] != second[: len(first) - shift] for shift in range(10))


def test_log_probabilities_are_those_of_the_model_whatever_is_drawn() -> None:
    for size, top in ((5, 0), (5, 5), (1030, 20), (3000, 1)):
        logits = logits_of("ties" if size == 1030 else "normal", size, size)
        exact = logits.astype(numpy.float64)
        expected = exact - exact.max() - numpy.log(numpy.exp(exact - exact.max()).sum())
        order = numpy.argsort(-exact, kind="stable")[:top]
        for sampling in (Sampling(), Sampling(0.3, top_k=3, repetition_penalty=1.5, seed=2)):
            for isa in cpu.isas():
                token, logprob, likeliest = sample(c_sampling(sampling), logits, [0, 1], top=top, isa=isa)
                assert logprob == pytest.approx(expected[token], abs=1e-5)
                assert [number for number, _ in likeliest] == order.tolist()
                assert [value for _, value in likeliest] == pytest.approx(expected[order].tolist(), abs=1e-5)
                assert token == sample(c_sampling(sampling), logits, [0, 1], isa=isa)[0]


# ---- what it refuses -------------------------------------------------------------------------------------------------


def test_settings_that_cannot_be_are_refused() -> None:
    for options in ({"top_p": 0}, {"temperature": -1}, {"min_p": 2}, {"top_k": -1}, {"repetition_penalty": 0}):
        with pytest.raises(OtaroError, match=next(iter(options))):
            Sampling(**options)


def test_sizes_are_checked_before_memory_is_touched() -> None:
    library = native.library()
    logits, history = numpy.zeros(20, dtype=numpy.float32), numpy.array([1, 2], dtype=numpy.int32)
    sampling, token = c_sampling(Sampling(1.0, repetition_penalty=1.1)), ctypes.c_int32()
    logprobs, tops = (ctypes.c_float * 4)(), (ctypes.c_int32 * 3)()
    good: dict[str, Any] = {
        "sampling": ctypes.byref(sampling),
        "logits": logits.ctypes.data,
        "logits_bytes": logits.nbytes,
        "vocabulary": 20,
        "history": history.ctypes.data,
        "history_bytes": history.nbytes,
        "history_count": 2,
        "position": 2,
        "token": ctypes.byref(token),
        "top": 3,
        "logprobs": logprobs,
        "logprobs_bytes": ctypes.sizeof(logprobs),
        "top_tokens": tops,
        "top_tokens_bytes": ctypes.sizeof(tops),
        "isa": 0,
    }
    assert library.otaro_sample(*good.values()) == 0
    argument, buffer, index, isa = 1, 2, 4, 5
    for name, value, error in (
        ("sampling", None, argument),
        ("logits", None, argument),
        ("logits_bytes", 79, buffer),
        ("vocabulary", 0, argument),
        ("vocabulary", 21, buffer),
        ("vocabulary", 2**40, argument),
        ("vocabulary", 2, index),
        ("history", None, argument),
        ("history_bytes", 7, buffer),
        ("history_count", -1, argument),
        ("history_count", 3, buffer),
        ("token", None, argument),
        ("top", -2, argument),
        ("top", 21, argument),
        ("logprobs", None, argument),
        ("logprobs_bytes", 15, buffer),
        ("top_tokens", None, argument),
        ("top_tokens_bytes", 11, buffer),
        ("isa", 99, isa),
    ):
        odd = {**good, name: value, **({"top": -1} if (name, value) == ("vocabulary", 2) else {})}
        assert library.otaro_sample(*odd.values()) == error, (name, value)
    history[1] = -1
    assert library.otaro_sample(*good.values()) == index
