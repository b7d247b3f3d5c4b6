"""Planes that come and go while a model runs: progressive loading, dropping and raising at any moment, and the end."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import architectures
import numpy
import pytest
import torch

import otaro
from otaro.checkpoint import PackedFolder
from otaro.cli import main
from otaro.engine.engine import Engine
from otaro.errors import FormatError, OtaroError, PrecisionError
from otaro.generation import chat, command
from otaro.precision import NARROWEST, Precision
from otaro.safetensors_file import SafetensorsFile

PROMPT = [5, 80, 3, 44, 17, 9, 60]
PATIENCE = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live")
    architectures.random_model("qwen3").save_pretrained(path / "model")
    otaro.pack(path / "model", path / "packed")
    return path / "packed"


class Gate:
    """Lets the files of wider precisions through one by one: stands for a slow disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = {width: threading.Event() for width in Precision}
        self.reached = {width: threading.Event() for width in Precision}
        self._open[NARROWEST].set()
        original = PackedFolder.planes

        def planes(folder: PackedFolder, width: Precision) -> Iterator[tuple[str, Any]]:
            for number, entry in enumerate(original(folder, width)):
                if number == 1:  # one plane is in by then
                    self.reached[width].set()
                    assert self._open[width].wait(PATIENCE)
                yield entry

        monkeypatch.setattr(PackedFolder, "planes", planes)

    def open(self, *widths: str) -> None:
        for width in widths or [str(width) for width in Precision]:
            self._open[Precision(width)].set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def wait_until(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(PATIENCE / 0.005)):
        if condition():
            return
        waiting.wait(0.005)
    raise AssertionError("it did not happen")


def memory_at(folder: Path, precision: str) -> int:
    return Engine(folder, precision).memory["weights"]


def test_a_text_begins_at_the_first_width_and_goes_on_with_wider_ones(folder: Path, gate: Gate) -> None:
    engine = Engine(folder, threads=1, progressive=True)
    assert engine.width == Precision.E5M3
    tokens = engine.tokens(PROMPT, max_new_tokens=6)
    found, widths = [], []
    for width in ("E5M4", "E5M5", "E5M6", "E5M7", "E5M8"):
        found.append(next(tokens))
        widths.append(engine.used)
        gate.open(width)
        wait_until(lambda width=width: engine.width == Precision(width))  # type: ignore[misc]
    found.append(next(tokens))
    widths.append(engine.used)
    assert widths == sorted(Precision)
    engine.finish_loading()
    # The same schedule with everything loaded.
    whole = Engine(folder, threads=1)
    whole.precision = Precision.E5M3
    expected = []
    for token, width in zip(whole.tokens(PROMPT, max_new_tokens=6), [*widths[1:], None], strict=True):
        expected.append(token)
        if width is not None:
            whole.precision = width
    assert found == expected


def test_a_width_that_is_still_coming_can_be_asked_for(folder: Path, gate: Gate) -> None:
    engine = Engine(folder, threads=1, progressive=True)
    engine.precision = Precision.E5M5
    assert (engine.precision, engine.width) == (Precision.E5M5, Precision.E5M3)
    assert list(engine.tokens(PROMPT, max_new_tokens=3, prefill="E5M8", draft="E5M4"))
    gate.open()
    engine.finish_loading()
    assert engine.width == Precision.E5M5
    engine.precision = Precision.E5M3
    assert engine.width == Precision.E5M3
    partial = Engine(folder, "E5M5", threads=1, progressive=True)
    with pytest.raises(PrecisionError, match="E5M6 is not loaded"):
        partial.precision = Precision.E5M6


def test_dropping_stops_what_is_being_loaded(folder: Path, gate: Gate) -> None:
    engine = Engine(folder, threads=1, progressive=True)
    gate.open("E5M4", "E5M5")
    assert gate.reached[Precision.E5M6].wait(PATIENCE)
    dropping = threading.Thread(target=engine.drop_to, args=("E5M4",))
    dropping.start()
    wait_until(lambda: engine._live._limit == Precision.E5M4)
    gate.open()
    dropping.join()
    engine.finish_loading()
    assert engine.width == Precision.E5M4
    assert engine.memory["weights"] == memory_at(folder, "E5M4")
    with pytest.raises(PrecisionError, match="E5M5 is not loaded"):
        engine.precision = Precision.E5M5
    engine.raise_to("E5M8")
    assert numpy.array_equal(engine.logits(PROMPT), Engine(folder, threads=1).logits(PROMPT))


def test_raising_waits_for_what_is_being_loaded_and_takes_over(folder: Path, gate: Gate) -> None:
    engine = Engine(folder, threads=1, progressive=True)
    assert gate.reached[Precision.E5M4].wait(PATIENCE)
    raising = threading.Thread(target=engine.raise_to, args=("E5M6",))
    raising.start()
    gate.open()
    raising.join()
    assert engine.width == Precision.E5M6
    engine.finish_loading()
    assert engine.width == Precision.E5M6
    assert engine.memory["weights"] == memory_at(folder, "E5M8")
    assert numpy.array_equal(engine.logits(PROMPT), Engine(folder, threads=1).logits(PROMPT, "E5M6"))


@pytest.mark.parametrize("seed", range(4))
def test_texts_run_through_any_order_of_changes(folder: Path, seed: int) -> None:
    """Two threads change at random while a third runs texts: no error, and in the end the bits of a fresh engine."""
    engine = Engine(folder, threads=2, progressive=True)
    failures: list[BaseException] = []
    over = threading.Event()

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def change(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(25):
            width = choice.choice(list(Precision))
            if choice.random() < 0.4:
                engine.raise_to(width)
            elif choice.random() < 0.7:
                engine.drop_to(width)
            else:
                try:
                    engine.precision = width
                except PrecisionError:
                    assert width > NARROWEST
            assert engine.memory["weights"] > 0

    def texts() -> None:
        while not over.is_set():
            try:
                text = engine.tokens(PROMPT, max_new_tokens=5, draft="E5M5")
            except PrecisionError:  # dropped by then; once a text has begun it goes on with what is there
                text = engine.tokens(PROMPT, max_new_tokens=5, draft="E5M3")
            assert len(list(text)) == 5

    running = guarded(texts)
    changes = [guarded(lambda number=number: change(2 * seed + number)) for number in range(2)]  # type: ignore[misc]
    for thread in changes:
        thread.join()
    over.set()
    running.join()
    assert not failures
    engine.finish_loading()
    engine.drop_to("E5M3")
    assert engine.memory["weights"] == memory_at(folder, "E5M3")
    engine.raise_to("E5M8")
    assert numpy.array_equal(engine.logits(PROMPT), Engine(folder, threads=1).logits(PROMPT))


def test_closing_stops_the_background(folder: Path, gate: Gate) -> None:
    engine = Engine(folder, threads=1, progressive=True)
    assert gate.reached[Precision.E5M4].wait(PATIENCE)
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: engine._live._limit == NARROWEST)
    gate.open()
    closing.join()
    assert engine.width == Precision.E5M3
    assert engine.memory["weights"] == memory_at(folder, "E5M3")
    engine.close()
    assert len(list(engine.tokens(PROMPT, max_new_tokens=2))) == 2


def test_a_program_may_end_while_planes_are_coming(folder: Path) -> None:
    script = (
        "import sys, time\n"
        "from otaro.checkpoint import PackedFolder\n"
        "from otaro.engine.engine import Engine\n"
        "original = PackedFolder.planes\n"
        "def slow(folder, width):\n"
        "    for entry in original(folder, width):\n"
        "        time.sleep(0.01)\n"
        "        yield entry\n"
        "engine = Engine(sys.argv[1], 'E5M3')\n"
        "PackedFolder.planes = slow\n"
        "engine._live.load_in_background(engine.weights.folder.precisions[0])\n"
        "print(next(engine.tokens([1, 2, 3], max_new_tokens=2)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().isdigit()


def cut(folder: Path, copy: Path, width: str, size: int) -> Path:
    shutil.copytree(folder, copy)
    with (copy / f"model-m{width[-1]}.safetensors").open("r+b") as file:
        file.truncate(size)
    return copy


def test_a_file_cut_before_or_while_it_is_read_is_said_and_the_rest_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(cut(folder, tmp_path / "before", "E5M6", 1000), threads=1, progressive=True)
    with pytest.raises(FormatError, match="model-m6.safetensors is truncated"):
        engine.finish_loading()
    engine.finish_loading()  # said once
    assert engine.width == Precision.E5M5
    assert engine.memory["weights"] == memory_at(folder, "E5M5")
    with pytest.raises(FormatError, match="model-m6.safetensors is truncated"):
        engine.raise_to("E5M8")
    assert engine.width == Precision.E5M5

    # Whole when it was opened, cut when it is read.
    broken = tmp_path / "while"
    shutil.copytree(folder, broken)
    original = SafetensorsFile.read

    def read(file: SafetensorsFile, name: str) -> Any:
        if file.path == broken / "model-m6.safetensors":
            os.truncate(file.path, file.data_start)
        return original(file, name)

    monkeypatch.setattr(SafetensorsFile, "read", read)
    engine = Engine(broken, threads=1, progressive=True)
    with pytest.raises(FormatError, match="model-m6.safetensors is truncated"):
        engine.finish_loading()
    assert engine.memory["weights"] == memory_at(folder, "E5M5")
    assert numpy.array_equal(engine.logits(PROMPT), Engine(folder, threads=1).logits(PROMPT, "E5M5"))


def test_a_file_taken_away_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model-m7.safetensors").unlink()
    with pytest.raises(OtaroError, match="model-m7.safetensors is missing"):
        Engine(broken, "E5M8", threads=1, progressive=True)

    def planes(folder: PackedFolder, width: Precision) -> Iterator[tuple[str, Any]]:
        raise OSError("the disk is gone")
        yield

    engine = Engine(broken, "E5M4", threads=1)
    monkeypatch.setattr(PackedFolder, "planes", planes)
    with pytest.raises(FormatError, match="planes of E5M5 cannot be read"):
        engine.raise_to("E5M5")


def test_generate_begins_early_and_shows_the_widths(
    packed_llama: Path, gate: Gate, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[Precision] = []

    def mark(text: str) -> None:
        widths.append(Precision(text.strip("[] ")))
        original(text)
        gate.open("E5M4")
        assert gate.reached[Precision.E5M5].wait(PATIENCE)
        gate.open()

    original = command.mark
    monkeypatch.setattr(command, "mark", mark)
    arguments = ["generate", str(packed_llama), "--prompt", "hello", "--progressive"]
    assert main([*arguments, "--max-new-tokens", "100", "--temperature", "2", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    assert widths[0] == Precision.E5M3
    assert widths[-1] > Precision.E5M3
    assert widths == sorted(widths)
    assert "".join(f"[{width}] " for width in widths) in captured.err
    assert re.search(r"\] E5M3 for 1, E5M\d for ", captured.err)
    assert "[E5M" not in captured.out


def test_the_widths_of_an_answer_are_in_its_json(packed_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(packed_llama), "--prompt", "hello", "--max-new-tokens", "3", "--json"]
    assert main([*arguments, "--precision", "E5M5"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["widths"] == {"E5M5": result["tokens"]}
    assert main([*arguments, "--progressive", "--backend", "transformers"]) == 2
    assert "--progressive needs the native engine" in capsys.readouterr().err


def test_commands_say_once_that_a_file_was_cut(
    packed_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = cut(packed_llama, tmp_path / "broken", "E5M4", 500)
    original = Engine.check_loading

    def check_loading(engine: Engine) -> None:
        engine._live._loader and engine._live._loader.join()
        original(engine)

    monkeypatch.setattr(Engine, "check_loading", check_loading)
    assert main(["generate", str(broken), "--prompt", "hello", "--max-new-tokens", "3", "--progressive"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("model-m4.safetensors is truncated") == 1
    assert "Traceback" not in errors
    lines = iter(["hello", "again", "/exit"])
    monkeypatch.setattr(chat, "ask", lambda: next(lines))
    assert main(["chat", str(broken), "--max-new-tokens", "3", "--progressive"]) == 0
    remarks = capsys.readouterr().err
    assert remarks.count("model-m4.safetensors is truncated") == 1
    assert remarks.count("tokens/s") == 2


def test_memory_follows_the_width_and_stays_within_three_percent(folder: Path, tmp_path: Path) -> None:
    """Of `1 + m` bits a weight and 5 bits a group; on a model whose rows fill their groups."""
    config = architectures.config("llama-tied")
    config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim = 256, 512, 512, 64
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    otaro.pack(tmp_path / "model", tmp_path / "packed")
    info = otaro.inspect(tmp_path / "packed")
    engine = Engine(tmp_path / "packed", threads=1)
    for precision in Precision:
        engine.drop_to(precision)
        expected = info.bits_per_weight(precision) * info.packed_parameters / 8
        assert expected <= engine.memory["weights"] <= 1.03 * expected, precision
        assert Engine(tmp_path / "packed", precision).memory["weights"] == engine.memory["weights"]


def test_a_text_goes_on_with_what_is_left_when_its_widths_are_dropped(folder: Path) -> None:
    engine = Engine(folder, threads=1)
    named: dict[str, Any] = {"prefill": "E5M8", "draft": "E5M5", "overrides": {"lm_head": "E5M8"}}
    text = engine.tokens(PROMPT, max_new_tokens=12, **named)
    first = next(text)
    engine.drop_to("E5M4")
    assert len([first, *text]) == 12
    assert engine.used == Precision.E5M4
    for name in named:
        with pytest.raises(PrecisionError, match="not loaded: E5M4"):
            engine.tokens(PROMPT, max_new_tokens=2, **{name: named[name]})


def test_single_layers_wait_for_their_planes_too(folder: Path) -> None:
    engine = Engine(folder, threads=1, progressive=True)
    assert len(list(engine.tokens(PROMPT, max_new_tokens=4, overrides={"lm_head": "E5M8"}))) == 4


def test_a_text_left_midway_is_named_and_not_waited_for(folder: Path) -> None:
    engine = Engine(folder, threads=1)
    text = engine.tokens(PROMPT, max_new_tokens=5)
    next(text)
    with pytest.raises(OtaroError, match="close its iterator"):
        next(engine.tokens(PROMPT, max_new_tokens=5))
    text.close()
    assert len(list(engine.tokens(PROMPT, max_new_tokens=5))) == 5


def test_logits_asked_for_within_a_text_are_refused_and_not_waited_for(folder: Path) -> None:
    engine = Engine(folder, threads=1)
    text = engine.tokens(PROMPT, max_new_tokens=5)
    first = next(text)
    with pytest.raises(OtaroError, match="close its iterator"):
        engine.logits(PROMPT)
    with ThreadPoolExecutor(1) as other:  # whoever goes on with the text is the one that cannot wait for it
        second = other.submit(next, text).result(PATIENCE)
        with pytest.raises(OtaroError, match="close its iterator"):
            other.submit(engine.logits, PROMPT).result(PATIENCE)
    assert [first, second, *text] == list(engine.tokens(PROMPT, max_new_tokens=5))
    assert engine.logits(PROMPT).shape[0] == len(PROMPT)


EXITS = """
import os, sys, threading, time
from otaro.engine.engine import Engine

folder = sys.argv[1]

def run(engine):
    while True:
        list(engine.tokens([1, 2, 3] * 5, max_new_tokens=40, draft="E5M3"))

Engine(folder, threads=1)  # imports all there is to import, which takes seconds: the attempts are forks
for attempt in range(4):
    child = os.fork()
    if child == 0:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        sys.exit(f"attempt {attempt} ended with {status}")
else:
    print("survived")
    sys.exit()
engine = Engine(folder, threads=2, progressive=attempt % 2 == 1)
for _ in range(2):
    threading.Thread(target=run, args=(engine,), daemon=True).start()
time.sleep(0.02 * attempt)
if attempt > 1:
    engine.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_program_may_end_while_threads_run_texts(folder: Path) -> None:
    """The interpreter does not wait for daemon threads: what they use must not go before they do."""
    command = [sys.executable, "-c", EXITS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "survived\n", "")


def test_an_engine_may_go_while_its_text_runs(folder: Path) -> None:
    """Whoever runs a text holds all of what it needs, though nobody holds the engine."""
    texts = [Engine(folder, threads=2).tokens(PROMPT, max_new_tokens=40) for _ in range(4)]
    expected = list(Engine(folder).tokens(PROMPT, max_new_tokens=40))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(list, texts)) == [expected] * 4
