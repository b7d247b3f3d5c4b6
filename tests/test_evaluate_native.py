"""``otaro eval`` by the native engine: the figures of torch, said to be the engine's, and never mixed with torch's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import packed_model, random_model
from transformers import LlamaConfig

import otaro
from otaro import cli
from otaro.errors import OtaroError
from otaro.evaluate.backend import NativeBackend, TorchBackend
from otaro.evaluate.divergence import measure_text
from otaro.evaluate.model import open_subject
from otaro.evaluate.parts import Parts
from otaro.evaluate.perplexity import POSITIONS_PER_SLICE
from otaro.evaluate.zero_shot import NativeScorer, TorchScorer
from otaro.precision import Precision
from otaro.tokenizer import load_tokenizer

CONTEXT = 300


@pytest.fixture(scope="module")
def folder(packed_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed Llama that reads more tokens than the engine runs at once."""
    path = tmp_path_factory.mktemp("native")
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    packed_model(config, path)
    for tokenizer in packed_llama.glob("tokenizer*"):
        (path / "packed" / tokenizer.name).write_bytes(tokenizer.read_bytes())
    return path / "packed"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run side by side: threads that wait for each other would wait for other tests."""
    monkeypatch.setattr("otaro.evaluate.backend.usable_cores", lambda: 1)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process: exit code, stdout, lines on stderr that do not say how far it is."""

    def call(*arguments: str | Path | int) -> tuple[int, str, list[str]]:
        capfd.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, [line for line in err.splitlines() if not line.endswith("%")]

    return call


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(random.Random(0).choices("etaoin shrdlu.\n", k=700)))
    return path


@pytest.mark.parametrize("window", [2, 127, 128, 129, 300])
def test_a_text_has_the_figures_of_torch(folder: Path, window: int) -> None:
    cpu = torch.device("cpu")
    tokens = torch.randint(0, 259, (2 * window,), generator=torch.Generator().manual_seed(window))
    figures = {}
    for backend in ("native", "torch"):
        subject = open_subject(str(folder), "all", cpu, backend)
        assert subject.backend.name == backend
        figures[backend] = measure_text(subject, tokens, window, Parts(None), lambda *_: None)
    for width in Precision:
        native, exact = figures["native"][width], figures["torch"][width]
        # Keys and values are float16, activations have 16 bits.
        assert native.cross_entropy == pytest.approx(exact.cross_entropy, rel=2e-4)
        assert native.divergence == pytest.approx(exact.divergence, rel=5e-2, abs=1e-6)
        assert native.same_token == pytest.approx(exact.same_token, abs=0.03 if window > 2 else 0.6)


def test_logits_come_in_parts_of_bounded_size(folder: Path) -> None:
    widths = [Precision.E5M8, Precision.E5M3]
    parts = list(NativeBackend(folder, Precision.E5M8).logits(torch.arange(CONTEXT) % 259, widths))
    lengths = [(0, 128), (128, 128), (256, CONTEXT - 256)]
    assert [(first, width, len(logits)) for first, width, logits in parts] == [
        (first, width, length) for first, length in lengths for width in widths
    ]
    assert max(len(logits) for _, _, logits in parts) == POSITIONS_PER_SLICE


def test_requests_have_the_scores_of_lm_evals_own_class(folder: Path) -> None:
    chance = random.Random(1)

    def words(count: int) -> str:
        return "".join(chance.choices("abcdefgh ", k=count)).strip() or "a"

    contexts = ["", words(1), words(40), words(40) + " ", words(290), words(500)]
    pairs = [(context, " " + words(length)) for context in contexts for length in (1, 3, 3, 20, 150)]
    pairs += [(contexts[2], " yes"), (contexts[2], " yet"), (contexts[2] + " yes", " yes")]
    chance.shuffle(pairs)
    requests: Any = [type("Request", (), {"args": pair}) for pair in pairs]
    tokenizer = load_tokenizer(folder)
    native = NativeScorer(NativeBackend(folder, Precision.E5M8), tokenizer)
    exact = TorchScorer(TorchBackend(otaro.load(folder)), tokenizer, batch_size=4)
    for width in (Precision.E5M8, Precision.E5M3, Precision.E5M5):
        native.set_width(width)
        exact.set_width(width)
        ours, theirs = native.loglikelihood(requests), exact.loglikelihood(requests)
        for pair, (score, greedy), (expected, likeliest) in zip(pairs, ours, theirs, strict=True):
            assert score == pytest.approx(expected, rel=2e-3, abs=2e-2), pair
            assert greedy == likeliest
    for scorer in (native, exact):
        with pytest.raises(OtaroError, match="answer of 301 tokens does not fit the model's context of 300"):
            scorer.loglikelihood([type("Request", (), {"args": ("a", "b" * (CONTEXT + 1))})])


def test_the_likeliest_tokens_are_known_as_such(folder: Path) -> None:
    backend = NativeBackend(folder, Precision.E5M4)
    scorer = NativeScorer(backend, load_tokenizer(folder))
    scorer.set_width(Precision.E5M4)
    context = [1, 2, 3]
    likeliest = []
    for _ in range(3):
        ((_, _, logits),) = backend.logits(torch.tensor(context + likeliest), [Precision.E5M4])
        likeliest.append(int(logits[-1].argmax()))
    other = [*likeliest[:2], (likeliest[2] + 1) % 259]
    answers = scorer._loglikelihood_tokens([(("", ""), context, ids) for ids in (likeliest, other, likeliest[:1])])
    assert [greedy for _, greedy in answers] == [True, False, True]
    assert answers[1][0] < answers[0][0] < answers[2][0]


def test_it_says_what_computed(run: Any, folder: Path, text: Path, tmp_path: Path) -> None:
    start = ("eval", folder, "--text", text, "--precisions", "E5M4")
    for options, backend, dtype in (((), "native", "int16"), (("--backend", "torch"), "torch", "float32")):
        code, _, remarks = run(*start, *options, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
        assert code == 0
        assert remarks[-1].startswith("computed by ")
        assert backend in remarks[-1]
        figures = json.loads((tmp_path / "a.json").read_text())
        assert (figures["backend"], figures["dtype"], figures["device"]) == (backend, dtype, "cpu")
        assert remarks[-1] in (tmp_path / "a.html").read_text()


def test_what_one_backend_measured_is_not_taken_for_the_others(
    run: Any, folder: Path, text: Path, tmp_path: Path
) -> None:
    start = ("eval", folder, "--text", text, "--window", "64", "--parts", tmp_path / "parts", "--json", "-")
    results: dict[str, Any] = {}
    for backend in ("native", "torch"):
        _, out, remarks = run(*start, "--backend", backend)
        assert remarks == []
        results[backend] = json.loads(out)["results"]
        _, out, remarks = run(*start, "--backend", backend)
        assert remarks[0].endswith(f"taken from {tmp_path / 'parts'}")
        assert json.loads(out)["results"] == results[backend]
    assert results["native"][0]["perplexity"] != results["torch"][0]["perplexity"]


def test_a_model_the_engine_does_not_know_is_measured_by_torch(
    run: Any, packed_llama: Path, text: Path, tmp_path: Path
) -> None:
    model = random_model("gpt2")
    model.resize_token_embeddings(259)
    model.save_pretrained(tmp_path / "plain")
    for tokenizer in packed_llama.glob("tokenizer*"):
        (tmp_path / "plain" / tokenizer.name).write_bytes(tokenizer.read_bytes())
    otaro.pack(tmp_path / "plain", tmp_path / "packed")
    rest = ("--text", text, "--precisions", "E5M4")
    code, out, remarks = run("eval", tmp_path / "packed", *rest, "--json", "-")
    assert code == 0
    assert json.loads(out)["backend"] == "torch"
    assert remarks == [f"{tmp_path}/packed runs through torch: models of type gpt2 do not run natively yet"]
    for arguments, words in (
        ((tmp_path / "packed", *rest, "--backend", "native"), "packed does not run natively: models of type gpt2"),
        ((tmp_path / "plain", *rest, "--backend", "native"), "plain is not a packed folder"),
        ((packed_llama, *rest, "--backend", "native", "--device", "meta"), "does not run on meta"),
        ((packed_llama, *rest, "--backend", "cuda"), "no backend cuda: choose auto, native or torch"),
    ):
        code, out, remarks = run("eval", *arguments)
        assert (code, out, len(remarks)) == (2, "", 1)
        assert words in remarks[0]
