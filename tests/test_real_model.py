"""The real model the demo uses, from its package: what the README promises of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import otaro
from otaro.generate import generate
from otaro.precision import Precision
from otaro.tokenizer import load_tokenizer


@pytest.mark.slow
def test_it_halves_and_still_answers(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    info = otaro.pack("smollm2", folder)
    assert info.size(Precision.E5M3) < info.size(Precision.E5M8) / 2
    assert info.size(Precision.E5M3) == (folder / "model-m3.safetensors").stat().st_size
    assert info.bits_per_weight(Precision.E5M8) == pytest.approx(9 + 8 / 64, abs=1e-3)
    assert info.bits_per_weight(Precision.E5M4) == pytest.approx(5 + 8 / 64, abs=1e-3)
    assert info.clamped_groups == 0

    model, tokenizer = otaro.load(folder), load_tokenizer(folder)
    for precision in (Precision.E5M8, Precision.E5M3):
        with model.at_precision(precision):
            answer = generate(model, tokenizer, "What is the capital of Japan?", max_new_tokens=12)
        assert "Tokyo" in answer.text
        assert answer.precision is precision
