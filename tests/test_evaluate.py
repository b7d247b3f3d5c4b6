"""Perplexity against a direct computation, and the report."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from otaro.errors import OtaroError
from otaro.evaluate import report
from otaro.evaluate.perplexity import (
    default_window,
    perplexity,
    perplexity_at_widths,
    split_windows,
    text_tokens,
)
from otaro.figure_file import check_plot
from otaro.json_file import write_json
from otaro.precision import Precision


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama).eval()


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(count))


def direct_cross_entropy(model: Any, windows: list[torch.Tensor]) -> float:
    """The definition, written out: one prediction at a time from the softmax in float64."""
    losses = []
    with torch.no_grad():
        for window in windows:
            log_probabilities = model(window[None]).logits[0].double().log_softmax(-1)
            losses += [-float(log_probabilities[i, window[i + 1]]) for i in range(len(window) - 1)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("count", "window", "windows", "predictions"),
    [
        (128, 32, 4, 124),
        (100, 32, 3, 93),  # the rest of 4 tokens is left out
        (31, 32, 1, 30),  # shorter than a window
        (32, 32, 1, 31),
        (2, 32, 1, 1),
        (7, 2, 3, 3),
        (128, 128, 1, 127),
    ],
)
def test_perplexity_is_that_of_the_definition(
    model: Any, count: int, window: int, windows: int, predictions: int
) -> None:
    text = tokens(count)
    result = perplexity(model, text, window=window)
    cut = [text[i * window : (i + 1) * window] for i in range(windows)]
    expected = direct_cross_entropy(model, cut)
    assert (result.windows, result.tokens) == (windows, predictions)
    assert result.cross_entropy == pytest.approx(expected, abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


def test_batches_and_slices_do_not_change_the_result(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tokens(7 * 40)
    alone = perplexity(model, text, window=40)
    batched = perplexity(model, text, window=40, batch_size=3)
    monkeypatch.setattr("otaro.evaluate.perplexity.POSITIONS_PER_SLICE", 7)
    sliced = perplexity(model, text, window=40)
    assert batched.cross_entropy == pytest.approx(alone.cross_entropy, abs=1e-6)
    assert sliced.cross_entropy == pytest.approx(alone.cross_entropy, abs=1e-6)


def test_progress_counts_windows(model: Any) -> None:
    seen: list[tuple[int, int]] = []
    perplexity(model, tokens(100), window=20, batch_size=2, progress=lambda _, done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_window_defaults_to_the_context(model: Any) -> None:
    assert default_window(model) == 128
    assert perplexity(model, tokens(300)).windows == 2


@pytest.mark.parametrize(
    ("count", "window", "message"),
    [
        (0, 8, "has 0 tokens"),
        (1, 8, "has 1 tokens"),
        (8, 1, "window of 1"),
        (300, 129, "longer than the model's context"),
    ],
)
def test_what_cannot_be_measured_is_refused(model: Any, count: int, window: int, message: str) -> None:
    with pytest.raises(OtaroError, match=message):
        perplexity(model, tokens(count), window=window)


def test_token_ids_must_be_one_dimensional() -> None:
    with pytest.raises(ValueError, match="one-dimensional"):
        split_windows(torch.zeros(2, 8, dtype=torch.long), 4)


def test_a_hopeless_model_has_infinite_perplexity() -> None:
    class Hopeless:
        device = torch.device("cpu")

        class config:  # noqa: N801
            @staticmethod
            def get_text_config() -> Any:
                return type("Config", (), {"max_position_embeddings": 16, "vocab_size": 4})

        def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            logits = torch.zeros(*input_ids.shape, 4)
            logits[..., 0] = 1e4
            return type("Output", (), {"logits": logits})

    result = perplexity(Hopeless(), torch.ones(8, dtype=torch.long), window=8)
    assert result.perplexity == math.inf
    assert result.cross_entropy == pytest.approx(1e4)


def test_empty_text_is_refused_by_name() -> None:
    with pytest.raises(OtaroError, match=r"book\.txt is empty"):
        text_tokens(None, " \n", 16, "book.txt")


def test_widths_differ_and_the_models_own_is_restored(packed_llama: Path) -> None:
    import otaro

    packed = otaro.load(packed_llama)
    results = perplexity_at_widths(packed, tokens(128), [Precision.E5M3, Precision.E5M8], window=32)
    assert [width.precision for width in results] == [Precision.E5M3, Precision.E5M8]
    assert results[0].result.cross_entropy != results[1].result.cross_entropy
    assert all(width.tokens_per_second > 0 for width in results)
    assert packed.precision == Precision.E5M8
    packed.set_precision("E5M3")
    assert perplexity(packed, tokens(128), window=32) == results[0].result


ROWS = [
    report.Row(Precision.E5M8, 9.078, 150_000_000, 12.3456, 100.0),
    report.Row(Precision.E5M3, 4.078, 70_000_000, math.inf, 250.5),
]


def test_table_shows_every_figure() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(report.table(ROWS))
    text = console.export_text()
    for figure in ("E5M8", "9.08", "150.00 MB", "12.346", "100.0", "E5M3", "inf", "250.5", "tokens/s"):
        assert figure in text


def test_json_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    write_json({"new": 1}, path)
    assert json.loads(path.read_text()) == {"new": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json({"not": object()}, path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_plot_refuses_an_unknown_kind_of_file(tmp_path: Path) -> None:
    with pytest.raises(OtaroError, match=r"ends in \.png"):
        check_plot(tmp_path / "plot.doc")


def test_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OtaroError, match=r"otaro-llm\[plot\]"):
        check_plot(tmp_path / "plot.png")
