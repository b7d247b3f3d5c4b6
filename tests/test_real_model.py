"""The real model the demo uses, from its package: what the README promises of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import otaro
from otaro.generate import generate
from otaro.precision import Precision
from otaro.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "packed"
    otaro.pack("smollm2", folder)
    return folder


@pytest.mark.slow
def test_the_narrowest_width_reads_less_than_half_of_the_widest(smollm2: Path) -> None:
    info = otaro.inspect(smollm2)
    assert info.size(Precision.E5M3) < info.size(Precision.E5M8) / 2
    assert info.size(Precision.E5M3) == (smollm2 / "model-m3.safetensors").stat().st_size
    assert info.bits_per_weight(Precision.E5M8) == pytest.approx(9 + 6 / 64, abs=1e-3)
    assert info.bits_per_weight(Precision.E5M4) == pytest.approx(5 + 6 / 64, abs=1e-3)
    assert info.clamped_groups == 0


@pytest.mark.slow
def test_it_answers_at_both_ends(smollm2: Path) -> None:
    model, tokenizer = otaro.load(smollm2), load_tokenizer(smollm2)
    for precision in (Precision.E5M8, Precision.E5M3):
        with model.at_precision(precision):
            answer = generate(model, tokenizer, "What is the capital of France?", max_new_tokens=12)
        assert "Paris" in answer.text
        assert answer.precision is precision
