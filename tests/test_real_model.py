"""The real model the demo uses, from its package: what the README promises of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import otaro
from otaro.engine.sampling import Sampling
from otaro.generation.request import Request
from otaro.generation.transformers import TransformersRunner
from otaro.precision import Precision
from otaro.text import prompt_tokens
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

    runner = TransformersRunner(otaro.load(folder), load_tokenizer(folder))
    prompt = prompt_tokens(runner.tokenizer, "What is the capital of Japan?")
    for precision in (Precision.E5M8, Precision.E5M3):
        runner.precision = precision
        answer = runner.generate(prompt, Request(12, Sampling()))
        assert "Tokyo" in answer.text
        assert answer.width is precision
