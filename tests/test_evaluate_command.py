"""``otaro eval`` on a text: plain and packed models against direct computations, the page, going on after a stop."""

from __future__ import annotations

import html.parser
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import otaro
from otaro import cli, figure_file, ops
from otaro.evaluate import divergence
from otaro.evaluate.perplexity import text_tokens
from otaro.precision import Precision
from otaro.tokenizer import load_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. " * 12
WINDOW = 32


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process: exit code, stdout, lines on stderr."""

    def call(*arguments: str | Path | int) -> tuple[int, str, list[str]]:
        capfd.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err.splitlines()

    return call


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def log_probabilities(model: Any, folder: Path) -> list[torch.Tensor]:
    """Of every window, in float64."""
    tokens = text_tokens(load_tokenizer(folder), TEXT, WINDOW)
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    with torch.no_grad():
        return [model(window[None]).logits[0].double().log_softmax(-1)[:-1] for window in windows]


def direct_divergence(expected: list[torch.Tensor], found: list[torch.Tensor]) -> tuple[float, float]:
    """The definition, one prediction at a time, and how often the likeliest token is the same."""
    pairs = [(p, q) for ps, qs in zip(expected, found, strict=True) for p, q in zip(ps, qs, strict=True)]
    divergences = [sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True)) for p, q in pairs]
    same = [int(p.argmax() == q.argmax()) for p, q in pairs]
    return sum(divergences) / len(pairs), sum(same) / len(pairs)


@pytest.mark.parametrize("command", ["eval", "tune"])
def test_a_model_with_a_weight_that_is_no_number_is_refused(
    run: Any, tiny_llama: Path, text_file: Path, tmp_path: Path, command: str
) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(tiny_llama, spoilt)
    weights = load_file(spoilt / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 7] = torch.nan
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    short = ("--window", WINDOW) if command == "eval" else ("--sequence-length", WINDOW, "--steps", 1)
    data = ("--text", text_file) if command == "eval" else (tmp_path / "tuned", "--data", text_file)
    code, _, remarks = run(command, spoilt, *data, *short)
    assert code == 2
    assert remarks[-1].endswith(
        "tensor model.layers.1.mlp.down_proj.weight holds nan at [3, 7]: weights must be finite"
    )
    assert not (tmp_path / "tuned").exists()


def test_a_plain_model_is_measured_in_full_precision_and_as_it_would_be_packed(
    run: Any, tiny_llama: Path, packed_llama: Path, text_file: Path
) -> None:
    rest = ("--text", text_file, "--window", WINDOW, "--precisions", "E5M5,E5M3", "--json", "-")
    code, out, remarks = run("eval", tiny_llama, *rest)
    assert code == 0, remarks
    figures = json.loads(out)
    assert (figures["packed"], figures["reference"]) == (False, "full")
    full, *narrow = figures["results"]
    assert full["precision"] == "full"
    assert "tokens_per_second" not in full  # simulated: speed would mean nothing
    expected = log_probabilities(AutoModelForCausalLM.from_pretrained(tiny_llama), tiny_llama)
    tokens = text_tokens(load_tokenizer(tiny_llama), TEXT, WINDOW)
    targets = torch.cat([tokens[i * WINDOW + 1 : (i + 1) * WINDOW] for i in range(len(expected))])
    loss = -torch.cat(expected).gather(1, targets[:, None]).mean()
    assert full["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-6)
    assert (full["kl_divergence"], full["same_token"]) == (0, 1)

    _, out, _ = run("eval", packed_llama, *rest, "--backend", "torch")
    packed = json.loads(out)["results"]
    for row, other in zip(narrow, packed, strict=True):
        found = log_probabilities(otaro.load(packed_llama, row["precision"]), packed_llama)
        divergence, same = direct_divergence(expected, found)
        assert row["kl_divergence"] == pytest.approx(divergence, rel=1e-3, abs=1e-8)
        assert row["same_token"] == pytest.approx(same)
        assert row["perplexity"] == pytest.approx(other["perplexity"], rel=1e-6)
        assert row["bits_per_weight"] == other["bits_per_weight"]
        assert row["size_bytes"] < other["size_bytes"] < row["size_bytes"] + 50_000  # files have headers
    assert narrow[0]["kl_divergence"] < narrow[1]["kl_divergence"]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_packed_model_is_compared_with_its_widest_precision(
    run: Any, packed_llama: Path, text_file: Path, tmp_path: Path, backend: str
) -> None:
    start = ("eval", packed_llama, "--text", text_file, "--window", WINDOW, "--backend", backend)
    code, out, remarks = run(*start, "--json", tmp_path / "a.json", "--precisions", "E5M3,E5M7")
    assert code == 0
    assert backend in remarks[0]
    assert remarks[1:] == ["KL divergence and agreement are with E5M7, the widest precision measured"]
    figures = json.loads((tmp_path / "a.json").read_text())
    narrow, wide = figures["results"]
    assert (figures["reference"], wide["kl_divergence"], wide["same_token"]) == ("E5M7", 0, 1)
    models = [otaro.load(packed_llama, precision) for precision in ("E5M7", "E5M3")]
    expected, _ = direct_divergence(*(log_probabilities(model, packed_llama) for model in models))
    assert narrow["kl_divergence"] == pytest.approx(expected, rel=1e-3 if backend == "torch" else 2e-2)
    assert f"{narrow['kl_divergence']:.4g}" in out
    # One width alone has nothing to be compared with.
    code, out, remarks = run(*start, "--json", "-", "--precisions", "E5M4")
    assert (code, remarks) == (0, [])
    assert "kl_divergence" not in json.loads(out)["results"][0]


def test_a_stopped_text_goes_on_from_its_last_part(
    run: Any, packed_llama: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "WINDOWS_PER_PART", 3)
    runs: list[int] = []
    measure = divergence._run

    def counting(subject: Any, windows: torch.Tensor, widths: Any, on_window: Any) -> Any:
        if len(runs) == stop_after:
            raise KeyboardInterrupt
        runs.append(len(widths))
        return measure(subject, windows, widths, on_window)

    monkeypatch.setattr(divergence, "_run", counting)
    arguments = ["eval", packed_llama, "--text", text_file, "--window", WINDOW, "--json"]

    def rows(path: Path) -> list[dict[str, Any]]:
        found = json.loads(path.read_text())["results"]
        return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in found]

    stop_after = 1000
    assert run(*arguments, tmp_path / "whole.json")[0] == 0
    count = len(runs)
    assert count > 3
    runs, stop_after = [], 2
    assert run(*arguments, tmp_path / "a.json") == (130, "", ["otaro: stopped"])
    assert not (tmp_path / "a.json").exists()
    runs, stop_after = [], 1000
    assert run(*arguments, tmp_path / "a.json")[0] == 0
    assert runs == [len(Precision)] * (count - 2)
    assert rows(tmp_path / "a.json") == rows(tmp_path / "whole.json")
    runs = []
    run(*arguments, tmp_path / "a.json", "--max-windows", "5")  # other windows in the last part
    assert runs == [len(Precision)]


class Page(html.parser.HTMLParser):
    """Collects what a browser would fetch or run, and the text of table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.cells: list[str] = []
        self._open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open = tag in ("td", "th")
        names = ("src", "href", "xlink:href", "data", "action", "srcset", "poster")
        self.links += [value or "" for name, value in attributes if name in names]

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.cells.append(data.strip())


def test_the_page_is_self_contained_and_shows_every_figure(
    run: Any, tiny_llama: Path, text_file: Path, tmp_path: Path
) -> None:
    model = tmp_path / "a<b> & c"  # names are escaped
    model.symlink_to(tiny_llama)
    path = tmp_path / "page.html"
    code, _, remarks = run(
        "eval", model, "--text", text_file, "--window", 64, "--html", path, "--plot", tmp_path / "p.svg"
    )
    assert code == 0, remarks
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("svg") == 2
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in text
    assert "url(http" not in text
    assert "a<b>" not in text
    code, out, _ = run("eval", model, "--text", text_file, "--window", 64, "--json", "-")
    for row in json.loads(out)["results"]:
        assert row["precision"] in page.cells
        assert f"{row['perplexity']:.3f}" in page.cells
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == sorted([model.name, "p.svg", "page.html", "page.parts.jsonl", "text.txt"])


def test_a_page_without_matplotlib_is_refused_at_once(
    run: Any, tiny_llama: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure_file, "find_spec", lambda name: None)
    code, out, remarks = run("eval", tiny_llama, "--text", text_file, "--html", tmp_path / "page.html")
    assert (code, out, len(remarks)) == (2, "", 1)
    assert "otaro-llm[plot]" in remarks[0]


@pytest.mark.parametrize("name", ["nowhere", "text.txt", "empty"])
def test_what_is_no_model_is_refused(run: Any, text_file: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    code, out, remarks = run("eval", tmp_path / name, "--text", text_file)
    assert (code, out, len(remarks)) == (2, "", 1)
    assert name in remarks[0]


def test_scales_of_a_plain_model_are_found_once(
    run: Any, tiny_llama: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for every window and width: weights do not change while they are measured."""
    found: list[tuple[int, ...]] = []
    scales = ops.scales

    def counted(weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        found.append((weight.data_ptr(), *weight.shape))
        return scales(weight, *rest)

    monkeypatch.setattr("otaro.ops.scales", counted)
    code, _, _ = run("eval", tiny_llama, "--text", text_file, "--window", WINDOW, "--max-windows", 3, "--device", "cpu")
    assert code == 0
    assert len(found) == len(set(found)) > 10
