"""``otaro tune`` from the command line to the folder it writes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from architectures import random_model
from conftest import byte_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from tuning import command, command_on_a_full_disk, killed_command, trainer

from experiments import common, tuning
from otaro import cli, demo
from otaro.errors import OtaroError
from otaro.precision import Precision
from otaro.sources import open_source
from otaro.sources.loading import load_model
from otaro.sources.scales import SCALES_NAME
from otaro.tune import report
from otaro.tune.callbacks import losses_by_width
from otaro.tune.command import measure_before
from otaro.tune.data import load_blocks
from otaro.tune.resume import checkpoints, last_complete, writing

DOCUMENT = Path(__file__).parent.parent / "docs" / "tuning.md"
RESULTS = ("model.safetensors", "tune.jsonl", "tune.json")
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all. " * 12


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


def short(book: Path, steps: int = 14) -> tuple[Any, ...]:
    return ("--data", book, "--steps", steps, "--batch-size", 2, "--sequence-length", 32, "--cpu")


def test_from_a_folder_to_a_folder(
    tiny_llama: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    more = ("--eval-text", book, "--eval-windows", 4, "--learning-rate", 1e-3, "--method", "otaro", "--delay", 2)
    assert command(tiny_llama, out, *short(book, 40), *more) == 0
    figures = json.loads((out / "tune.json").read_text())
    assert figures["updates"] == 40
    for width in map(str, Precision):
        assert figures["perplexity_after"][width] < 0.8 * figures["perplexity_before"][width]
    assert len((out / "tune.jsonl").read_text().splitlines()) == 40
    printed = capsys.readouterr().out
    assert "E5M3" in printed
    assert "perplexity after" in printed
    assert not (tmp_path / "tuned.tuning").exists()

    original, tuned = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tiny_llama, out))
    assert original.keys() == tuned.keys()
    assert all(not torch.equal(original[name], tuned[name]) for name in original)
    assert AutoTokenizer.from_pretrained(out)("abc")["input_ids"] == byte_tokenizer()("abc")["input_ids"]
    before, after = (json.loads((path / "config.json").read_text()) for path in (tiny_llama, out))
    assert before == after


def test_the_closing_table_counts_what_tiers_learned(
    tiny_llama: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tiny_llama, tmp_path / "tuned", *short(book, 5)) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("E5M")}
    assert {width: row[1] for width, row in rows.items()} == {"E5M4": "5", "E5M3": "5"}
    last = json.loads((tmp_path / "tuned" / "tune.jsonl").read_text().splitlines()[-1])
    assert last["tiers"].keys() == {"E5M4", "E5M3"}


def test_fitting_alone(tiny_llama: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every update fits, nothing else is learned, and narrow widths lose less than by rounding alone."""
    out, more = tmp_path / "fitted", ("--eval-text", book, "--eval-windows", 4)
    assert command(tiny_llama, out, *short(book, 30), "--fit-only", *more) == 0
    figures = json.loads((out / "tune.json").read_text())
    assert figures["updates"] == 30
    assert {width: count for width, count in figures["batches"].items() if count} == {"E5M4": 30, "E5M3": 30}
    assert len((out / "tune.jsonl").read_text().splitlines()) == 30
    assert "learning rate" not in capsys.readouterr().err
    assert figures["learning_rate"] is None
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tiny_llama, out))
    cell = max(float(weight.abs().max()) for weight in before.values()) / 2**4
    assert all(torch.allclose(before[name], after[name], atol=cell) for name in before)
    before, after = figures["perplexity_before"], figures["perplexity_after"]
    assert after["E5M8"] == pytest.approx(before["E5M8"], rel=1e-3)
    assert abs(after["E5M3"] - after["E5M8"]) < 0.5 * abs(before["E5M3"] - before["E5M8"])


@pytest.mark.parametrize(
    "options",
    [
        ("--learning-rate", 1e-3),
        ("--optimizer", "sgd"),
        ("--average", 0.4),
        ("--held-back", 0.1),
        ("--lora", 4),
        ("--method", "fp16"),
        ("--scheme", "nearest"),
    ],
)
def test_fitting_alone_refuses_what_has_no_meaning_for_it(
    options: tuple[str, Any], tiny_llama: Path, book: Path, tmp_path: Path
) -> None:
    named = options[1] if options[0] in ("--method", "--scheme") else options[0]
    with pytest.raises(OtaroError, match=named):
        command(tiny_llama, tmp_path / "fitted", *short(book, 5), "--fit-only", *options)
    assert not list(tmp_path.glob("fitted*"))


def snippet() -> str:
    """The example of docs/tuning.md for Python."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## From Python")[2]
    return "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))


def test_python_the_demo_and_the_command_are_the_same_run(
    tiny_llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning rate and all: the logs have the same losses to the last digit."""
    out = tmp_path / "by-command"
    line = (tiny_llama, out, "--data", book, "--steps", 4, "--sequence-length", 32, "--cpu")
    assert command(*line, "--batch-size", 8, "--seed", 42) == 0
    monkeypatch.chdir(tmp_path)
    program = snippet()
    assert "max_steps=200" in program
    with open_source(str(tiny_llama)) as source:
        model = load_model(source)
    tokenizer = byte_tokenizer()
    exec(
        program.replace("200", "4"),
        {"model": model, "blocks": load_blocks([book], tokenizer, 32), "tokenizer": tokenizer},
    )
    written, saved = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "tuned"))
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], saved[name]) for name in written)
    with safe_open(out / SCALES_NAME, "pt") as first, safe_open(tmp_path / "tuned" / SCALES_NAME, "pt") as second:
        assert first.metadata() == second.metadata()
        assert first.keys() == second.keys()
        assert all(torch.equal(first.get_tensor(name), second.get_tensor(name)) for name in first.keys())  # noqa: SIM118
    log = (out / "tune.jsonl").read_bytes()
    assert (tmp_path / "run" / "tune.jsonl").read_bytes() == log
    for name, value in {"MODEL": str(tiny_llama), "STEPS": 4, "BATCH": 8, "SEQUENCE": 32}.items():
        monkeypatch.setattr(f"otaro.demo.{name}", value)
    demo._tune(tmp_path / "demo", book)
    assert (tmp_path / "demo" / "tune.jsonl").read_bytes() == log
    highest = max(json.loads(entry).get("learning_rate", 0) for entry in log.splitlines())
    assert highest == pytest.approx(3e-4 * 576 / 80 * (8 * 32 / 8192) ** 0.5)


def test_bf16_needs_no_gpu(tiny_llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor to be told that there is none."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    out = tmp_path / "tuned"
    assert command(tiny_llama, out, *short(book, 2)[:-1], "--bf16", "--eval-text", book, "--eval-windows", 1) == 0
    assert json.loads((out / "tune.json").read_text())["updates"] == 2


def test_early_stopping(tiny_llama: Path, book: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    watch = ("--eval-text", book, "--eval-windows", 2, "--save-steps", 3, "--early-stopping", 2)
    command(tiny_llama, out, *short(book, 60), *watch, "--learning-rate", 0)
    # Without a step it never gets better than at the first checkpoint: two more end the run.
    figures = json.loads((out / "tune.json").read_text())
    assert figures["updates"] == 9
    assert figures["averaged_updates"] == 0


@pytest.mark.parametrize(
    "options, averaged, last_rate",
    [
        ((), 4, 0.3),
        (("--average", 0.8), 8, 0.3),
        (("--average", 0), 0, 0.0),
        (("--method", "bps"), 0, 0.0),
        (("--method", "bps", "--average", 0.8), 8, 0.3),
        (("--recipe", "paper"), 0, 1.0),
    ],
)
def test_weights_are_averaged_and_the_schedule_goes_with_it(
    options: tuple[Any, ...], averaged: int, last_rate: float, tiny_llama: Path, book: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    command(tiny_llama, out, *short(book, 10), *options, "--learning-rate", 1)
    assert json.loads((out / "tune.json").read_text())["averaged_updates"] == averaged
    last = json.loads((out / "tune.jsonl").read_text().splitlines()[9])
    # The schedule is one update short of its end.
    assert last["learning_rate"] == pytest.approx(last_rate, abs=0.05)


def test_a_folder_whose_name_is_not_text_is_refused_at_once(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("Some text. " * 50, encoding="utf-8")
    name = os.fsdecode(os.fsencode(tmp_path) + b"/q\xff")
    assert cli.main(["tune", str(tiny_llama), name, "--data", str(tmp_path / "text.txt"), "--steps", "1", "--cpu"]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "completion_only"),
    [
        ((), False),
        (("--completion-only",), True),
        (("--method", "bps"), True),
        (("--recipe", "paper"), True),
        (("--recipe", "paper", "--no-completion-only"), False),
    ],
)
def test_prompts_are_learned_as_the_recipe_says(
    options: tuple[str, ...],
    completion_only: bool,
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the first loss is another one without, or with them."""
    data = tmp_path / "data.jsonl"
    answers = ["It is what the sky looks like.", "It is deep, and wide, and cold."]
    data.write_text("".join(json.dumps({"instruction": "What is the sea?", "output": each}) + "\n" for each in answers))
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    out = tmp_path / "tuned"
    arguments = (*options, "--data", data, "--steps", 1, "--sequence-length", 32, "--batch-size", 2, "--cpu")
    command(model, out, *arguments)
    assert ("tokens, prompts learned too" in capsys.readouterr().err) is not completion_only
    assert json.loads((out / "tune.json").read_text())["completion_only"] is completion_only
    other = tmp_path / "other"
    command(model, other, *arguments, "--no-completion-only" if completion_only else "--completion-only")
    first, second = (json.loads((each / "tune.jsonl").read_text().splitlines()[0]) for each in (out, other))
    assert first["loss"] != second["loss"]


def test_adapters_can_be_averaged(tiny_llama: Path, book: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = tmp_path / "tuned"
    command(tiny_llama, out, *short(book, 10), "--lora", 2, "--average", 0.5)
    assert json.loads((out / "tune.json").read_text())["averaged_updates"] == 5


def test_early_stopping_and_an_average_exclude_each_other(tiny_llama: Path, book: Path, tmp_path: Path) -> None:
    with pytest.raises(OtaroError, match="--average"):
        command(
            *(tiny_llama, tmp_path / "tuned"),
            *(*short(book), "--eval-text", book, "--early-stopping", 2, "--average", 0.5),
        )


def test_early_stopping_needs_a_text(tiny_llama: Path, book: Path, tmp_path: Path) -> None:
    with pytest.raises(OtaroError, match="--eval-text"):
        command(tiny_llama, tmp_path / "tuned", *short(book), "--early-stopping", 2)


@pytest.mark.parametrize("options", [(), ("--scheme", "nearest")])
def test_what_was_measured_is_what_is_packed(
    options: tuple[str, ...], tiny_llama: Path, book: Path, tmp_path: Path
) -> None:
    """By the default recipe and by another: tuned, packed and evaluated, a width has the perplexity that tuning saw."""
    tuned, packed, figures = tmp_path / "tuned", tmp_path / "packed", tmp_path / "figures.json"
    command(tiny_llama, tuned, *short(book), "--eval-text", book, "--eval-windows", 3, *options)
    assert cli.main(["pack", str(tuned), str(packed), *options]) == 0
    line = ("eval", packed, "--text", book, "--window", 32, "--max-windows", 3, "--backend", "torch", "--json", figures)
    assert cli.main([str(argument) for argument in line]) == 0
    after = json.loads((tuned / "tune.json").read_text())["perplexity_after"]
    evaluated = {row["precision"]: row["perplexity"] for row in json.loads(figures.read_text())["results"]}
    assert evaluated.keys() == after.keys()
    assert evaluated == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("name", ["tiers", "bps"])
def test_an_experiments_run_is_the_commands(name: str, tiny_llama: Path, book: Path, tmp_path: Path) -> None:
    """The same settings, the same bits: what is measured is what ships."""
    command(tiny_llama, tmp_path / "tuned", *short(book, 9), "--method", name, "--seed", 3)
    blocks = load_blocks([book], byte_tokenizer(), 32)
    options = {"max_steps": 9, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False}
    run, _ = tuning.tune(common.load_model(str(tiny_llama), torch.device("cpu")), blocks, name, 3, **options)
    written = load_file(tmp_path / "tuned" / "model.safetensors")
    state = {key: value for key, value in run.model.state_dict().items() if key in written}
    assert len(state) == len(written) > 0
    assert all(torch.equal(written[key], value) for key, value in state.items())


def test_compiling_can_be_turned_off(
    tiny_llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(
        "otaro.tune.command.run", lambda model, out, args, *rest, **options: chosen.append(args.compile)
    )
    for option in ((), ("--no-compile",), ("--compile",)):
        command(tiny_llama, tmp_path / "tuned", *short(book, 1), *option)
    assert chosen == [None, False, True]


def test_a_stopped_run_goes_on(tiny_llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from otaro.tune.callbacks import UpdateCallback

    out, work, whole = tmp_path / "tuned", tmp_path / "tuned.tuning", tmp_path / "whole"
    line = (*short(book, 9), "--save-steps", 4, "--eval-text", book, "--eval-windows", 1)
    original = UpdateCallback.on_step_begin

    def ask(self: UpdateCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        original(self, args, state, control, **kwargs)
        self.trainer.asked_to_stop = state.global_step == 5

    monkeypatch.setattr(UpdateCallback, "on_step_begin", ask)
    assert command(tiny_llama, out, *line) == 130
    monkeypatch.undo()
    assert not out.exists()
    assert (work / "checkpoint-6").is_dir()
    with pytest.raises(OtaroError, match="was not finished: add --resume"):
        command(tiny_llama, out, *line)
    with pytest.raises(OtaroError, match="with method tiers, not bps"):
        command(tiny_llama, out, *line, "--resume", "--method", "bps")
    assert command(tiny_llama, out, *line, "--resume") == 0
    assert command(tiny_llama, whole, *line) == 0
    for name in RESULTS:
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.fixture(scope="module")
def whole_run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Any, ...], Path]:
    """What `otaro tune` is told, but for OUT, and what it wrote when nothing stopped it."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "book.txt").write_text(TEXT)
    options = (*short(folder / "book.txt", 10), "--save-steps", 4, "--eval-text", folder / "book.txt")
    line = (*options, "--eval-windows", 1)
    assert command(tiny_llama, folder / "tuned", *line) == 0
    return line, folder / "tuned"


def test_what_cannot_be_gone_on_with_is_not_in_the_way(
    whole_run: tuple[tuple[Any, ...], Path], tiny_llama: Path, tmp_path: Path
) -> None:
    """A run that was killed before its first checkpoint was whole: start again, and measure again."""
    line, whole = whole_run
    out, work = tmp_path / "tuned", tmp_path / "tuned.tuning"
    (work / "checkpoint-4").mkdir(parents=True)
    (work / "before.json").write_text("of another model")
    with pytest.raises(OtaroError, match="start without --resume"):
        command(tiny_llama, out, *line, "--resume")
    assert command(tiny_llama, out, *line) == 0
    for name in RESULTS:
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_perplexity_before_is_of_the_text_after_is_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run has it from the first one, unless that was given another text."""
    calls: list[int] = []
    monkeypatch.setattr(report, "measure", lambda trainer, tokens, *_: (calls.append(1), {"E5M8": float(tokens[0])})[1])
    run = trainer(tmp_path)

    def before(token: int, resume: bool) -> float:
        return measure_before(run, tmp_path, torch.tensor([token, 5]), 2, None, resume=resume)["E5M8"]

    assert [before(7, False), before(7, True), before(8, True), before(9, False)] == [7, 7, 8, 9]
    assert len(calls) == 3


@pytest.mark.slow
def test_killed_three_times_it_ends_as_if_never_stopped(
    whole_run: tuple[tuple[Any, ...], Path], tiny_llama: Path, tmp_path: Path
) -> None:
    """Between two checkpoints, before the first of its own, and as the result is written."""
    line, whole = whole_run
    out, resumed = tmp_path / "tuned", ()
    for when, checkpoint in (
        ("6", "checkpoint-4"),
        ("7", "checkpoint-4"),
        ("fit6", "checkpoint-10"),
        ("result", "checkpoint-10"),
    ):
        assert processes.run(killed_command, when, tiny_llama, out, *line, *resumed) == -9
        assert not out.exists()
        assert last_complete(tmp_path / "tuned.tuning") == tmp_path / "tuned.tuning" / checkpoint
        resumed = ("--resume",)
    assert command(tiny_llama, out, *line, *resumed) == 0
    for name in RESULTS:
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "when, size, path, cause",
    [
        ("5", 700, "tuned.tuning/tune.jsonl", "File too large"),
        ("5", 200_000, "tuned.tuning/checkpoint-8", "File too large"),  # safetensors' writer
        ("5", 600_000, "tuned.tuning/checkpoint-8", "the disk may be full"),  # torch's
        ("fit3", 200_000, "tuned.tuning/tiers.safetensors", "File too large"),
        ("result", 200_000, "tuned", "File too large"),
    ],
)
def test_a_disk_that_is_full(
    when: str,
    size: int,
    path: str,
    cause: str,
    whole_run: tuple[tuple[Any, ...], Path],
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    """One sentence, nothing under a final name, and with more room the run goes on and ends as if never stopped."""
    line, whole = whole_run
    out, work = tmp_path / "tuned", tmp_path / "tuned.tuning"
    started = (command_on_a_full_disk, when, size, str(tmp_path / "said"), tiny_llama, out, *line)
    assert processes.run(*started) == 2
    *_, sentence = (tmp_path / "said").read_text().splitlines()
    last = "checkpoint-4" if when == "5" else "checkpoint-10"
    how = f"free some space, then resume the run, which goes on from {last}"
    assert sentence == f"otaro: error: {tmp_path / path} could not be written: {cause}: {how}"
    assert "Traceback" not in (tmp_path / "said").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said", "tuned.tuning"]
    assert list(checkpoints(work).values()) == [work / last]
    assert command(tiny_llama, out, *line, "--resume") == 0
    for name in RESULTS:
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_what_each_library_says_of_a_full_disk(tmp_path: Path) -> None:
    for save, reason in (
        (lambda: Path("/dev/full").write_text("text"), "No space left on device"),
        (lambda: byte_tokenizer().backend_tokenizer.save("/dev/full"), "No space left on device"),
        (lambda: torch.save({"weight": torch.zeros(9999)}, "/dev/full"), "the disk may be full"),
    ):
        expected = f"^model could not be written: {reason}: free some space, then start again$"
        with pytest.raises(OtaroError, match=expected), writing(Path("model"), tmp_path):
            save()
    with pytest.raises(RuntimeError, match="shapes"), writing(Path("model"), tmp_path):
        raise RuntimeError("shapes do not match")


def test_a_finished_run_is_not_gone_on_with(
    whole_run: tuple[tuple[Any, ...], Path], tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked to go on, it says that it is done, clears up what a kill left, and changes nothing."""
    line, whole = whole_run
    out = shutil.copytree(whole, tmp_path / "tuned")
    (tmp_path / "tuned.tuning").mkdir()
    assert command(tiny_llama, out, *line, "--resume") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"{out} holds the finished run of 10 updates: nothing is left to do"
    assert sorted(tmp_path.iterdir()) == [out]
    for name in RESULTS:
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    with pytest.raises(OtaroError, match="exists already"):
        command(tiny_llama, out, *line)
    (out / "tune.json").write_text("[]")
    with pytest.raises(OtaroError, match="exists already"):
        command(tiny_llama, out, *line, "--resume")


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "gemma3", "qwen3-moe", "gpt-oss", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_source_becomes_the_model_it_describes(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    random_model(architecture, dtype).save_pretrained(tmp_path / "model")
    with open_source(tmp_path / "model") as source:
        loaded = load_model(source)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for (name, value), (other, wanted) in zip(loaded.named_buffers(), expected.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(value, wanted)
    state = expected.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, expected.eval()(ids).logits)


def test_a_mixture_of_experts_is_tuned_and_written(book: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    model = random_model("qwen3-moe")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    assert command(tmp_path / "moe", tmp_path / "tuned", *short(book)) == 0
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").state_dict()
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").state_dict()
    assert all(not torch.equal(original[name], tuned[name]) for name in original)


@pytest.mark.parametrize("method", ["tiers", "bps"])
def test_adapters_are_trained_and_merged(method: str, tiny_llama: Path, book: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = tmp_path / "tuned"
    more = ("--lora", 4, "--method", method, "--learning-rate", 1e-2, "--eval-text", book, "--eval-windows", 3)
    assert command(tiny_llama, out, *short(book, 30), *more) == 0
    original, tuned = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tiny_llama, out))
    assert original.keys() == tuned.keys()
    changed = {name for name in original if not torch.equal(original[name], tuned[name])}
    assert changed >= {name for name in original if "proj" in name}
    # Tiers choose codes of embeddings too.
    assert ("model.embed_tokens.weight" in changed) == (method == "tiers")
    assert not any("norm" in name for name in changed)
    figures = json.loads((out / "tune.json").read_text())
    assert all(figures["perplexity_after"][str(w)] < figures["perplexity_before"][str(w)] for w in Precision)


@pytest.mark.parametrize(
    "options, method, said",
    [
        ((), "tiers", None),
        (("--lora", 4), "tiers", None),
        (("--scheme", "nearest"), "bps", "the scheme nearest has no tiers, so the method is bps"),
        (("--lora", 4, "--method", "uniform"), "uniform", None),
    ],
)
def test_where_a_recipe_cannot_have_tiers(
    options: tuple[Any, ...],
    method: str,
    said: str | None,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[str] = []
    monkeypatch.setattr("otaro.tune.command.run", lambda model, out, args, *rest, **named: seen.append(args.method))
    assert command("smollm2", tmp_path / "tuned", *short(book), *options) == 0
    assert seen == [method]
    printed = capsys.readouterr().err
    assert ("so the method is bps" in printed) == (said is not None)
    assert said is None or said in " ".join(printed.split())


def test_lora_without_peft(tiny_llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otaro.tune.model.find_spec", lambda name: None)
    with pytest.raises(OtaroError, match=r"otaro-llm\[tune\]"):
        command(tiny_llama, tmp_path / "tuned", *short(book), "--lora", 4)


@pytest.mark.parametrize("updates", [1, 3])
def test_the_plot_of_a_short_run_shows_every_update(
    updates: int, tiny_llama: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *rest, **options: (drawn.append(self), save(self, *rest)))
    more = ("--eval-text", book, "--eval-windows", 1)
    command(tiny_llama, tmp_path / "tuned", *short(book, updates), *more)
    assert (tmp_path / "tuned" / "tune.png").read_bytes().startswith(b"\x89PNG")
    path, perplexity, loss = drawn[0].axes
    assert all(tick == round(tick) for axes in (path, loss) for tick in axes.get_xticks())
    log = [json.loads(line) for line in (tmp_path / "tuned" / "tune.jsonl").read_text().splitlines()]
    expected = losses_by_width(log)
    assert expected.keys() == {"full", "E5M4", "E5M3"}
    marked = {line.get_label(): line for line in loss.lines if line.get_marker() not in ("", "None", None)}
    assert {name: list(zip(*line.get_data(), strict=True)) for name, line in marked.items()} == expected
    figures = json.loads((tmp_path / "tuned" / "tune.json").read_text())
    for line in perplexity.lines:
        measured = figures[f"perplexity_{line.get_label()}"]
        assert dict(zip(*line.get_data(), strict=True)) == measured


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--method", "best"), "unknown method"),
        (("--recipe", "best"), "unknown recipe"),
        (("--optimizer", "best"), "best is not a valid OptimizerNames"),
        (("--bf16", "--fp16"), "one of fp16 and bf16"),
        (("--sequence-length", 500), "longer than the model's 128 positions"),
        (("--resume",), "no checkpoint in"),
        (("--data", "missing.txt"), "there is no file or folder missing.txt"),
        (("--seed", "-1"), "the seed -1 is no number from 0 to 4294967295"),
        (("--epochs", "inf"), "the number of epochs inf is no number to tune with"),
        (("--learning-rate", "inf"), "the learning rate inf is no number to tune with"),
        (("--method", "bps", "--exploration", "nan"), "the λ nan is no number to tune with"),
        (("--ultra-low", ""), "the method tiers fits ultra-low widths: name some"),
        (("--scheme", "best"), "^unknown scheme"),
        (("--optimizer", "galore_adamw"), "the optimizer galore_adamw cannot be had: .*galore"),
        (("--report-to", "nobody"), "the run cannot report to nobody: nobody is not supported"),
    ],
)
def test_what_cannot_be_run(
    arguments: tuple[Any, ...],
    message: str,
    tiny_llama: Path,
    book: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OtaroError, match=message):
        command(tiny_llama, tmp_path / "tuned", *short(book), *arguments)
    assert sorted(tmp_path.iterdir()) == before
    assert "so the method is" not in capsys.readouterr().err


def test_places_that_cannot_be_written(tiny_llama: Path, book: Path, tmp_path: Path) -> None:
    with pytest.raises(OtaroError, match="exists already"):
        command(tiny_llama, tmp_path, *short(book))
    with pytest.raises(OtaroError, match="not a folder"):
        command(tiny_llama, tmp_path / "a" / "b", *short(book))
    with pytest.raises(OtaroError, match="'.' is no name for a folder"):
        command(tiny_llama, ".", *short(book))


def test_a_model_without_a_tokenizer(tiny_llama: Path, book: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(tiny_llama, folder)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(OtaroError, match="bare holds no tokenizer that can be read .it has none of their files"):
        command(folder, tmp_path / "tuned", *short(book))
