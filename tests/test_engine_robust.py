"""What the engine must stand: lack of memory, neighbours, bad requests from the command line; and what must repeat."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import architectures
import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

import otaro
from otaro import ops
from otaro.cli import main
from otaro.engine.engine import Engine
from otaro.engine.native import Matrix
from otaro.engine.sampling import Sampling
from otaro.errors import OtaroError
from otaro.precision import Precision
from otaro.safetensors_file import SafetensorsFile
from otaro.sefp import Format

PROMPT = [5, 80, 3, 44, 17, 9, 60]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of different shapes."""
    path = tmp_path_factory.mktemp("robust")
    for name in ("llama", "qwen3"):
        architectures.random_model(name).save_pretrained(path / name)
        otaro.pack(path / name, path / f"{name}-packed")
    return [path / "llama-packed", path / "qwen3-packed"]


def test_drawn_tokens_repeat_with_threads_drafts_and_runs(folders: list[Path]) -> None:
    sampling = Sampling(0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=7)
    texts = [
        list(Engine(folders[0], threads=threads).tokens(PROMPT, max_new_tokens=24, sampling=sampling))
        for threads in (1, 2, 4, 4)
    ]
    assert texts[1:] == texts[:-1]
    engine = Engine(folders[0], threads=2)
    drafted = [list(engine.tokens(PROMPT, max_new_tokens=24, sampling=sampling, draft="E5M3")) for _ in range(2)]
    assert drafted == [texts[0]] * 2


def test_engines_of_different_models_and_widths_do_not_disturb_each_other(folders: list[Path]) -> None:
    jobs = [(folder, precision) for folder in folders for precision in (Precision.E5M8, Precision.E5M3)]
    expected = [Engine(folder, threads=1).logits(PROMPT, precision) for folder, precision in jobs]
    found: dict[int, list[numpy.ndarray]] = {number: [] for number in range(len(jobs))}

    def work(number: int) -> None:
        folder, precision = jobs[number]
        engine = Engine(folder, precision, threads=2)
        found[number] = [engine.logits(PROMPT, precision) for _ in range(8)]

    workers = [threading.Thread(target=work, args=(number,)) for number in found]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number, results in found.items():
        assert len(results) == 8
        assert all(numpy.array_equal(result, expected[number]) for result in results)


def test_two_callers_of_one_engine_take_turns(folders: list[Path]) -> None:
    engine = Engine(folders[0], threads=2)
    expected = list(engine.tokens(PROMPT, max_new_tokens=12))
    found: list[list[int]] = []
    workers = [
        threading.Thread(target=lambda: found.append(list(engine.tokens(PROMPT, max_new_tokens=12)))) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [expected] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_dropped_planes_are_given_back_to_the_system() -> None:
    def resident() -> int:
        return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

    weight = torch.randn(4096, 4096)
    planes, _ = ops.pack(weight, Format())
    matrix = Matrix(planes, weight.shape, Format(), threads=1)
    held, before = matrix.nbytes, resident()
    for bit in range(8, 3, -1):
        matrix.drop_bit(bit)
    freed = held - matrix.nbytes
    assert freed == 5 * weight.numel() // 8
    assert before - resident() > 0.8 * freed


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--prompt", "hello " * 40], "do not fit the"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "hello", "--max-new-tokens", "1000"], "shorten the prompt or ask for fewer"),
    ],
    ids=["long", "empty", "many"],
)
def test_bad_prompts_are_one_sentence(
    packed_llama: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str, backend: str
) -> None:
    assert main(["generate", str(packed_llama), *arguments, "--backend", backend]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_a_context_beyond_the_model_s_is_refused(packed_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(packed_llama), "--prompt", "hello", "--context", "4096"]) == 2
    assert "a context of 4096 tokens is not possible: the model's own is 128" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_no_memory_is_one_sentence(tmp_path: Path, packed_llama: Path) -> None:
    config = architectures.config("llama")
    config.max_position_embeddings, config.vocab_size = 2**22, 259
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for path in packed_llama.glob("tokenizer*"):
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    otaro.pack(tmp_path / "model", tmp_path / "packed")
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from otaro.cli import main\n"
        "arguments = ['generate', sys.argv[1], '--prompt', 'hello', '--max-new-tokens', '2', '--threads', '1']\n"
        "assert main([*arguments, '--context', '64']) == 0  # everything is imported now\n"
        "used = resource.getpagesize() * int(Path('/proc/self/statm').read_text().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000,) * 2)\n"
        "print('limited', file=sys.stderr)\n"
        "sys.exit(main([*arguments, '--context', str(2**22)]))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "packed")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    said = done.stderr.split("limited\n")[1]
    assert said == "otaro: error: there is not enough memory: choose a smaller context or a lower precision\n"


def test_a_file_that_memory_cannot_take_is_named(packed_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with SafetensorsFile(packed_llama / "model-m3.safetensors") as file:
        name = next(iter(file.tensors))
        monkeypatch.setattr(torch, "empty", empty)
        with pytest.raises(OtaroError, match=r"not enough memory to read .* from model-m3.safetensors"):
            file.read(name)


def test_memory_that_runs_out_in_python_is_one_sentence(
    packed_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Engine, "run_steps", run)
    assert main(["generate", str(packed_llama), "--prompt", "hello", "--max-new-tokens", "2"]) == 2
    assert "otaro: error: there is not enough memory" in capsys.readouterr().err
