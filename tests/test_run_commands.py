"""otaro bench and export, and which way generate runs a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import architectures
import pytest
from gguf import GGUFReader

import otaro
from otaro.cli import main
from otaro.errors import OtaroError


def test_generate_says_when_it_runs_through_transformers(
    packed_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt", "hello", "--max-new-tokens", "4"]
    assert main(["generate", str(packed_llama), *arguments]) == 0
    assert "transformers" not in capsys.readouterr().err
    model = architectures.random_model("gemma")
    model.save_pretrained(tmp_path / "model")
    for path in packed_llama.glob("tokenizer*"):
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    otaro.pack(tmp_path / "model", tmp_path / "packed")
    main(["generate", str(tmp_path / "packed"), *arguments])
    assert "runs through transformers: models of type gemma" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "packed"), *arguments, "--backend", "native"]) == 2
    assert main(["generate", str(packed_llama), *arguments, "--backend", "fast"]) == 2


def test_both_ways_give_the_same_greedy_text(packed_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for backend in ("native", "transformers"):
        arguments = ["--prompt", "hello", "--max-new-tokens", "6", "--backend", backend]
        assert main(["generate", str(packed_llama), *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_prompt_that_fits_is_not_refused_because_of_a_default(
    packed_llama: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    arguments = ["generate", str(packed_llama), "--raw", "--backend", backend]
    prompt = ["--prompt", "x" * 120]
    assert main([*arguments, *prompt, "--json"]) == 0  # a context of 128, and 256 new tokens if there were room
    result, remarks = capsys.readouterr()
    assert 1 <= json.loads(result)["tokens"] <= 8
    assert "the answer ends here" in remarks
    assert main([*arguments, *prompt, "--max-new-tokens", "9"]) == 2
    assert "context of 128" in capsys.readouterr().err
    assert main([*arguments, "--prompt", "x" * 128]) == 2
    assert "128 tokens of prompt" in capsys.readouterr().err
    assert main([*arguments, "--prompt", "x" * 20, "--context", "24", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 4
    assert main([*arguments, *prompt, "--context", "129"]) == 2
    assert "context of 129 tokens is not possible" in capsys.readouterr().err


def test_a_draft_changes_nothing(packed_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(packed_llama), "--prompt", "hello", "--max-new-tokens", "16"]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert main([*arguments, "--draft", "E5M3"]) == 0
    assert capsys.readouterr().out == plain


def test_bench_measures_every_width_asked_for(
    packed_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt-tokens", "20", "--new-tokens", "4", "--rounds", "2", "--threads", "1"]
    out = tmp_path / "figures.json"
    folder = str(packed_llama)
    assert main(["bench", folder, "--precisions", "E5M8,E5M3", *arguments, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    machine = figures["machine"]
    assert machine["threads"] == 1
    assert machine["read_bytes_per_second"] > 1e6
    assert machine["processor"]
    assert machine["versions"]["numpy"]
    assert [row["text"] for row in figures["speculation"]] == ["answers", "prose"]
    rows = figures["results"]
    short = tmp_path / "short.json"
    assert main(["bench", folder, "--precisions", "E5M4", *arguments, "--no-speculation", "--json", str(short)]) == 0
    assert json.loads(short.read_text())["speculation"] == []
    assert [row["precision"] for row in rows] == ["E5M8", "E5M3"]
    assert rows[0]["weight_bytes"] > 1.7 * rows[1]["weight_bytes"]
    for row in rows:
        assert min(row["speed"].values()) > 0
        read = row["read_bytes_per_token"] * row["speed"]["decode"]
        assert row["bandwidth_share"] == pytest.approx(read / machine["read_bytes_per_second"])
        assert row["peer"] is None
    assert "decode" in capsys.readouterr().out
    coded = tmp_path / "coded.json"
    assert main(["bench", folder, "--precisions", "E5M3", *arguments, "--kv-cache", "E5M3", "--json", str(coded)]) == 0
    figures = json.loads(coded.read_text())
    assert figures["kv_cache"] == "E5M3"
    # Heads of 20 dimensions: 32 codes of 4 bits and an exponent, beside 32 numbers of 16 bits.
    assert figures["results"][0]["cache_bytes"] * 64 == rows[0]["cache_bytes"] * 17
    assert main(["bench", folder, "--against", "nothing"]) == 2


def test_export_writes_a_file_that_can_be_read(packed_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "twin.gguf"
    assert main(["export", str(packed_llama), str(out), "--precision", "E5M6"]) == 0
    assert GGUFReader(out).fields["general.architecture"].contents() == "llama"
    assert main(["export", str(packed_llama), str(out), "--precision", "E5M6"]) == 2


def test_bench_refuses_files_it_could_not_write_before_it_measures(packed_llama: Path, tmp_path: Path) -> None:
    from otaro.bench.command import bench

    with pytest.raises(OtaroError, match="there is no folder"):
        bench(packed_llama, json_out=tmp_path / "nowhere" / "figures.json")


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_an_answer_ends_before_the_stop_text(
    packed_llama: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    arguments = ["generate", str(packed_llama), "--prompt", "hello", "--max-new-tokens", "40", "--backend", backend]
    assert main(arguments) == 0
    text = capsys.readouterr().out.rstrip("\n")
    stop = text[12:15]
    assert main([*arguments, "--stop", "never in there", "--stop", stop]) == 0
    assert capsys.readouterr().out.rstrip("\n") == text[: text.index(stop)]
    assert main([*arguments, "--stop", ""]) == 2
    assert "a stop string is empty" in capsys.readouterr().err


def test_llama_cpp_without_memory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from otaro.bench import llama_cpp

    freed: list[str] = []
    api = SimpleNamespace(
        llama_log_callback=lambda function: function,
        llama_log_set=lambda *_: None,
        llama_model_default_params=SimpleNamespace,
        llama_model_load_from_file=lambda *_: "model",
        llama_model_get_vocab=lambda model: "vocabulary",
        llama_context_default_params=SimpleNamespace,
        llama_init_from_model=lambda *_: None,
        llama_model_free=freed.append,
    )
    monkeypatch.setattr(llama_cpp, "import_llama_cpp", lambda: api)
    with pytest.raises(OtaroError, match="no memory for 64 tokens"):
        llama_cpp.LlamaCpp(tmp_path / "twin.gguf", context=64, threads=1)
    assert freed == ["model"]
