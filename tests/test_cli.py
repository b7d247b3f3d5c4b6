"""The command line: what each command prints, and that every bad input is one line and exit code 2."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import otaro
from otaro import cli
from otaro.errors import OtaroError
from otaro.precision import Precision

TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def remarks(self) -> list[str]:
        return [line for line in self.err.splitlines() if line]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process, as the console script does."""

    def call(*arguments: str | Path) -> Outcome:
        capfd.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return call


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def refused(outcome: Outcome, *words: str) -> None:
    """One line that says it all, exit code 2, nothing on stdout."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert len(outcome.remarks) == 1, outcome.err
    assert outcome.err.startswith("otaro: error: ")
    for word in words:
        assert word in outcome.err


def in_subprocess(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from otaro.cli import main; sys.exit(main())", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


# ---- help and version


def test_version(run: Any) -> None:
    outcome = run("--version")
    assert (outcome.code, outcome.out) == (0, f"otaro {otaro.__version__}\n")


@pytest.mark.parametrize("command", ["pack", "info", "verify", "cut", "generate", "serve", "eval", "demo"])
def test_every_command_explains_itself_with_an_example(run: Any, command: str) -> None:
    outcome = run(command, "--help")
    assert outcome.code == 0
    assert f"Example: otaro {command}" in outcome.out or f"| otaro {command}" in outcome.out
    assert command in run("--help").out


def test_no_command_shows_the_help(run: Any) -> None:
    outcome = run()
    assert outcome.code == 2
    assert "Usage: otaro" in outcome.out


# ---- pack, info, verify, cut


def test_pack_and_info(run: Any, tiny_llama: Path, tmp_path: Path) -> None:
    packed = run("pack", tiny_llama, tmp_path / "packed", "--precision", "e5m6", "--json")
    assert packed.code == 0, packed.err
    shown = run("info", tmp_path / "packed", "--json")
    assert json.loads(shown.out) == json.loads(packed.out)
    assert otaro.inspect(tmp_path / "packed").precisions == [Precision.from_mantissa(bits) for bits in (6, 5, 4, 3)]


def test_info_for_people(run: Any, packed_llama: Path) -> None:
    outcome = run("info", packed_llama)
    assert outcome.code == 0
    for word in ("LlamaForCausalLM", "nested", "groups of 64", *map(str, Precision)):
        assert word in outcome.out
    assert f"{otaro.inspect(packed_llama).bits_per_weight(Precision.E5M3):.2f}" in outcome.out


def test_pack_takes_every_setting_of_the_format(run: Any, tiny_llama: Path, tmp_path: Path) -> None:
    settings = ("--group-size", "32", "--scheme", "nested", "--max-shard-size", "20kB")
    assert run("pack", tiny_llama, tmp_path / "packed", *settings, "--embedding-floor", "E5M6").code == 0
    info = otaro.inspect(tmp_path / "packed")
    assert info.embedding_floor == Precision.E5M6
    assert info.format == otaro.Format("nested", 32)
    assert len(info.files) > len(Precision)


def test_verify(run: Any, packed_llama: Path) -> None:
    outcome = run("verify", packed_llama)
    assert outcome.code == 0
    assert "complete and unaltered" in outcome.out
    answer = json.loads(run("verify", packed_llama, "--json").out)
    assert answer["complete"] is True
    assert answer["files"] == otaro.inspect(packed_llama).files


def test_verify_finds_an_altered_byte(run: Any, packed_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(packed_llama, folder)
    path = folder / "model-m4.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused(run("verify", folder), "model-m4.safetensors")


def test_cut(run: Any, packed_llama: Path, tmp_path: Path) -> None:
    outcome = run("cut", packed_llama, tmp_path / "small", "--precision", "E5M4", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == json.loads(run("info", tmp_path / "small", "--json").out)
    assert otaro.inspect(tmp_path / "small").precisions == [Precision.E5M4, Precision.E5M3]
    assert run("verify", tmp_path / "small").code == 0


def test_pack_refuses_what_is_not_a_model(run: Any, tmp_path: Path) -> None:
    refused(run("pack", tmp_path / "nowhere", tmp_path / "out"), "nowhere")
    (tmp_path / "empty").mkdir()
    refused(run("pack", tmp_path / "empty", tmp_path / "out"), "empty")
    (tmp_path / "model.gguf").write_text("not really")
    refused(run("pack", tmp_path / "model.gguf", tmp_path / "out"), "model.gguf")
    assert not (tmp_path / "out").exists()


def test_output_that_exists_is_left_alone(run: Any, tiny_llama: Path, packed_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    refused(run("pack", tiny_llama, tmp_path / "out"), "out")
    refused(run("cut", packed_llama, tmp_path / "out", "--precision", "E5M4"), "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    "settings, words",
    [
        (("--precision", "E5M9"), ("unknown precision 'E5M9'", "E5M8, E5M7, E5M6, E5M5, E5M4, E5M3")),
        (("--scheme", "magic"), ("unknown scheme 'magic'", "truncate, nearest, nested")),
        (("--group-size", "48"), ("group size 48", "32, 64, 128, 256")),
        (("--group-size", "many"), ("--group-size",)),
        (("--max-shard-size", "much"), ("'much' is not a size",)),
        (("--max-shard-size", "0GB"), ("'0GB' is not a size",)),
        (("--colour",), ("--colour",)),
    ],
)
def test_pack_refuses_bad_settings(
    run: Any, tiny_llama: Path, tmp_path: Path, settings: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(run("pack", tiny_llama, tmp_path / "out", *settings), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["info", "verify", "generate", "cut"])
def test_folders_that_are_not_packed_are_refused(
    run: Any, tiny_llama: Path, text_file: Path, tmp_path: Path, command: str
) -> None:
    rest: dict[str, tuple[str | Path, ...]] = {
        "generate": ("--prompt", "hello"),
        "cut": (tmp_path / "out", "--precision", "E5M3"),
    }
    for folder in (tmp_path / "nowhere", text_file, tiny_llama):
        refused(run(command, folder, *rest.get(command, ())), folder.name)


def test_unknown_command(run: Any) -> None:
    refused(run("pakc"), "'pakc'")


@pytest.mark.parametrize(
    "text, size",
    [("5GB", 5_000_000_000), ("500 mb", 500_000_000), ("2GiB", 2 * 2**30), ("1.5kB", 1500), ("100m", 10**8), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert cli.parse_size(text) == size


@pytest.mark.parametrize("text", ["100", "0MB", "MB", "1iB", "-1GB", "1e9B"])
def test_sizes_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(OtaroError, match="is not a size"):
        cli.parse_size(text)


# ---- generate


def test_generate_streams_text_alone_to_stdout(run: Any, packed_llama: Path) -> None:
    outcome = run("generate", packed_llama, "--prompt", "hello", "--precision", "E5M4", "--max-new-tokens", "5")
    assert outcome.code == 0, outcome.err
    assert outcome.out.endswith("\n")
    assert "tokens/s" not in outcome.out
    assert outcome.remarks[-1].startswith("E5M4: ")
    assert "tokens/s" in outcome.remarks[-1]


def test_generate_as_json_says_what_the_text_says(run: Any, packed_llama: Path) -> None:
    arguments = ("generate", packed_llama, "--prompt", "hello", "--max-new-tokens", "5", "--raw")
    result = json.loads(run(*arguments, "--json").out)
    assert result["text"] + "\n" == run(*arguments).out
    assert result["width"] == "E5M8"
    assert 1 <= result["tokens"] <= 5
    assert 0 < result["first_token_seconds"] <= result["seconds"]
    assert result["tokens_per_second"] > 0


def test_generate_is_greedy_and_like_transformers(run: Any, packed_llama: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    text = run(
        "generate", packed_llama, "--prompt", "abc", "--raw", "--max-new-tokens", "12", "--precision", "E5M3"
    ).out
    model = otaro.load(packed_llama, "E5M3")
    tokenizer = AutoTokenizer.from_pretrained(packed_llama)
    ids = tokenizer("abc", return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            if ids[0, -1] == tokenizer.eos_token_id:
                break
    assert text == tokenizer.decode(ids[0, start:], skip_special_tokens=True) + "\n"


def test_chat_template_is_used_unless_raw(packed_llama: Path) -> None:
    from otaro.text import prompt_tokens
    from otaro.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(packed_llama)
    assert tokenizer.decode(prompt_tokens(tokenizer, "hi")) == "<user>hi<end><bot>"
    assert tokenizer.decode(prompt_tokens(tokenizer, "hi", raw=True)) == "hi"


def test_a_seed_repeats_what_is_drawn(run: Any, packed_llama: Path) -> None:
    arguments = ("generate", packed_llama, "--prompt", "hello", "--max-new-tokens", "20", "--temperature", "1.5")
    texts = [run(*arguments, "--seed", seed).out for seed in ("1", "1", "2")]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_precision_from_the_environment(run: Any, packed_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTARO_PRECISION", "e5m5")
    arguments = ("generate", packed_llama, "--prompt", "hello", "--max-new-tokens", "1")
    assert run(*arguments).remarks[-1].startswith("E5M5: ")
    assert run(*arguments, "--precision", "E5M3").remarks[-1].startswith("E5M3: ")
    monkeypatch.setenv("OTARO_PRECISION", "high")
    refused(run(*arguments), "unknown precision 'high'")


@pytest.mark.parametrize("prompt", [("--prompt", "-"), ()])
def test_prompt_from_a_pipe(
    run: Any, packed_llama: Path, monkeypatch: pytest.MonkeyPatch, prompt: tuple[str, ...]
) -> None:
    arguments = ("generate", packed_llama, "--max-new-tokens", "8")
    expected = run(*arguments, "--prompt", "grüße").out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("grüße\n".encode())))
    assert run(*arguments, *prompt).out == expected


@pytest.mark.parametrize(
    "data, words", [(b"", ("prompt is empty",)), (b"ab\xff", ("stdin is not UTF-8", "position 2"))]
)
def test_unusable_prompts_from_a_pipe(
    run: Any, packed_llama: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    refused(run("generate", packed_llama), *words)


def test_a_terminal_without_a_prompt_is_asked_for_one(
    run: Any, packed_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    refused(run("generate", packed_llama), "--prompt TEXT")


@pytest.mark.parametrize(
    "settings, words",
    [
        (("--max-new-tokens", "0"), ("--max-new-tokens",)),
        (("--max-new-tokens", "-3"), ("--max-new-tokens",)),
        (("--temperature", "-1"), ("--temperature",)),
        (("--precision", "fp16"), ("unknown precision 'fp16'", "E5M8, E5M7")),
        (("--max-new-tokens", "128"), ("context of 128", "shorten the prompt")),
    ],
)
def test_generate_refuses_bad_settings(
    run: Any, packed_llama: Path, settings: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(run("generate", packed_llama, "--prompt", "hello", *settings), *words)


def test_a_precision_the_folder_does_not_hold_is_refused(run: Any, packed_llama: Path, tmp_path: Path) -> None:
    assert run("cut", packed_llama, tmp_path / "small", "--precision", "E5M4").code == 0
    refused(run("generate", tmp_path / "small", "--prompt", "hello", "--precision", "E5M8"), "E5M8", "E5M4")
    refused(run("cut", tmp_path / "small", tmp_path / "wide", "--precision", "E5M6"), "E5M6", "E5M4")
    (tmp_path / "text.txt").write_text(TEXT)
    evaluated = run("eval", tmp_path / "small", "--text", tmp_path / "text.txt", "--precisions", "E5M5")
    refused(evaluated, "E5M5", "E5M4, E5M3")


def test_a_folder_without_a_tokenizer_is_refused(run: Any, packed_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(packed_llama, folder, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*", "chat_*"))
    refused(run("generate", folder, "--prompt", "hello"), "no tokenizer")


# ---- eval


def test_eval_tables_json_and_plot_agree(run: Any, packed_llama: Path, text_file: Path, tmp_path: Path) -> None:
    arguments = ("eval", packed_llama, "--text", text_file, "--window", "32", "--max-windows", "2")
    outcome = run(*arguments, "--json", tmp_path / "figures.json", "--plot", tmp_path / "plot.png")
    assert outcome.code == 0, outcome.err
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["window"], figures["windows"], figures["tokens"]) == (32, 2, 62)
    assert [row["precision"] for row in figures["results"]] == [str(precision) for precision in Precision]
    for row in figures["results"]:
        assert row["precision"] in outcome.out
        assert f"{row['perplexity']:.3f}" in outcome.out
        assert row["size_bytes"] == otaro.inspect(packed_llama).size(Precision(row["precision"]))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    piped = run(*arguments, "--json", "-", "--precisions", "E5M3,e5m8")
    chosen = {row["precision"]: row["perplexity"] for row in json.loads(piped.out)["results"]}
    assert list(chosen) == ["E5M3", "E5M8"]
    everything = {row["precision"]: row["perplexity"] for row in figures["results"]}
    assert chosen == {name: everything[name] for name in chosen}


def test_eval_is_the_perplexity_of_a_model_loaded_at_that_width(run: Any, packed_llama: Path, text_file: Path) -> None:
    from otaro.evaluate.perplexity import perplexity, text_tokens
    from otaro.tokenizer import load_tokenizer

    outcome = run("eval", packed_llama, "--text", text_file, "--json", "-", "--backend", "torch")
    tokens = text_tokens(load_tokenizer(packed_llama), TEXT, 64)
    for row in json.loads(outcome.out)["results"]:
        assert row["perplexity"] == perplexity(otaro.load(packed_llama, row["precision"]), tokens).perplexity


def test_eval_refuses_bad_input(run: Any, packed_llama: Path, text_file: Path, tmp_path: Path) -> None:
    refused(run("eval", packed_llama, "--text", tmp_path / "missing.txt"), "missing.txt", "No such file")
    refused(run("eval", packed_llama, "--text", tmp_path), "Is a directory")
    (tmp_path / "empty.txt").write_text("\n")
    refused(run("eval", packed_llama, "--text", tmp_path / "empty.txt"), "empty.txt is empty")
    (tmp_path / "short.txt").write_text("a")
    refused(run("eval", packed_llama, "--text", tmp_path / "short.txt"), "at least 2")
    (tmp_path / "binary.txt").write_bytes(b"ab\xff")
    refused(run("eval", packed_llama, "--text", tmp_path / "binary.txt"), "binary.txt is not UTF-8")
    refused(run("eval", packed_llama, "--text", text_file, "--precisions", "E5M2"), "unknown precision 'E5M2'")
    refused(run("eval", packed_llama, "--text", text_file, "--precisions", ""), "unknown precision ''")
    refused(run("eval", packed_llama, "--text", text_file, "--window", "1"), "--window")
    refused(run("eval", packed_llama, "--text", text_file, "--window", "500"), "context of 128")
    refused(run("eval", packed_llama, "--text", text_file, "--max-windows", "0"), "--max-windows")
    refused(run("eval", packed_llama, "--text", text_file, "--plot", tmp_path / "a.doc"), "a.doc", ".png")
    refused(run("eval", packed_llama, "--text", text_file, "--json", tmp_path / "no" / "a.json"), "no folder")
    refused(run("eval", packed_llama), "--text")


# ---- demo


@pytest.fixture
def small_demo(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo on the tiny model; the folder its temporary files go to."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    small = {"MODEL": str(tiny_llama), "WINDOW": 32, "WINDOWS": 2, "ANSWER_TOKENS": 4, "STEPS": 2, "SEQUENCE": 32}
    for name, value in small.items():
        monkeypatch.setattr(f"otaro.demo.{name}", value)
    return tmp_path / "temporary"


def test_demo_shows_every_width_and_leaves_nothing(run: Any, small_demo: Path) -> None:
    outcome = run("demo")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    for precision in Precision:
        row = [line for line in lines if str(precision) in line][-1]
        # precision, bits per weight, size and its unit, perplexity before and after, speed
        assert len(row.replace("│", " ").split()) == 7
    assert list(small_demo.iterdir()) == []


def test_demo_keeps_the_packed_model_when_asked(run: Any, small_demo: Path, tmp_path: Path) -> None:
    outcome = run("demo", "--out", tmp_path / "kept")
    assert outcome.code == 0, outcome.err
    assert otaro.verify(tmp_path / "kept").precisions == list(Precision)
    refused_again = run("demo", "--out", tmp_path / "kept")
    assert refused_again.code == 2
    assert run("demo", "--keep").code == 0
    (kept,) = small_demo.iterdir()
    assert otaro.inspect(kept / "packed").precisions == list(Precision)


# ---- failures end in one place


def fails_with(error: BaseException) -> Any:
    def command(*_: Any, **__: Any) -> None:
        raise error

    return command


@pytest.mark.parametrize(
    "error, words",
    [
        (OtaroError("the moon is\n  full"), ("the moon is full",)),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), ("/data/x: No space left", "free some space")),
        (PermissionError(errno.EACCES, "Permission denied", "secret"), ("secret: Permission denied",)),
        (OSError("a library's\nlong\nstory"), ("a library's long story",)),
    ],
)
def test_foreseen_failures_are_one_line(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("otaro.checkpoint.inspect", fails_with(error))
    refused(run("info", "folder"), *words)


def test_a_bug_keeps_its_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otaro.checkpoint.inspect", fails_with(KeyError("oops")))
    with pytest.raises(KeyError):
        run("info", "folder")


def test_debug_shows_the_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTARO_DEBUG", "1")
    monkeypatch.setattr("otaro.checkpoint.inspect", fails_with(OtaroError("no")))
    with pytest.raises(OtaroError):
        run("info", "folder")


def test_interruption_is_one_word(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otaro.checkpoint.inspect", fails_with(KeyboardInterrupt()))
    outcome = run("info", "folder")
    assert (outcome.code, outcome.out, outcome.remarks) == (130, "", ["otaro: stopped"])


def test_otaros_own_warnings_are_shown_and_others_are_not(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    def inspect(folder: Path) -> None:
        warnings.warn("otaro: this will be slow", stacklevel=2)
        warnings.warn("some library is unhappy", stacklevel=2)
        raise OtaroError("done")

    monkeypatch.setattr("otaro.checkpoint.inspect", inspect)
    assert run("info", "folder").remarks == ["otaro: this will be slow", "otaro: error: done"]


# ---- real processes: pipes and signals


def test_stdout_of_a_pipe_is_the_text_alone(packed_llama: Path, run: Any) -> None:
    arguments = ("generate", packed_llama, "--max-new-tokens", "8", "--precision", "E5M4")
    done = in_subprocess(*arguments, input="hello\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == run(*arguments, "--prompt", "hello").out
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_ends_it_quietly(packed_llama: Path) -> None:
    command = f"{sys.executable} -c 'from otaro.cli import main; import sys; sys.exit(main())' generate {packed_llama}"
    done = subprocess.run(
        ["bash", "-c", f"{command} --prompt hello --max-new-tokens 64 | true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_ctrl_c_stops_a_generation(packed_llama: Path) -> None:
    # The signal is sent by the process itself when the first piece of text is out: no race, no waiting.
    code = (
        "import os, signal, sys; from otaro import cli, console; "
        "console.stream = lambda text: os.kill(os.getpid(), signal.SIGINT); sys.exit(cli.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", str(packed_llama), "--prompt", "hello", "--max-new-tokens", "100"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OTARO_DEBUG": ""},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "otaro: stopped"
    assert "Traceback" not in done.stderr
