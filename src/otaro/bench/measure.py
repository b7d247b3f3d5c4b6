"""How fast a packed model runs at each width, how much memory it takes, and how that compares with llama.cpp.

A run reads a prompt and then generates greedily; prefill counts the prompt's tokens, decode the median over new tokens.
Runs of all widths, and of the peer, take turns, and medians over the rounds are reported: on a machine that is busy
with other things ratios stay right when times do not.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from otaro.bench.llama_cpp import LlamaCpp, import_llama_cpp
from otaro.bench.machine import Bandwidth, GpuBandwidth, describe
from otaro.bench.speculation import SpeculationRow, measure_speculation
from otaro.engine.cuda.launches import CUDA, choose
from otaro.engine.engine import FLOAT16, Engine
from otaro.engine.sampling import Sampling
from otaro.engine.shape import MatrixRole
from otaro.errors import OtaroError
from otaro.export import export_gguf
from otaro.export.blocks import block_type
from otaro.precision import NARROWEST, Precision
from otaro.progress import Progress
from otaro.tokenizer import load_tokenizer

Run = Callable[[Sequence[int], int], int]
"""Runs tokens from a position on and picks the next."""


@dataclass(frozen=True)
class Speed:
    """Medians over rounds, in tokens per second; the first token in seconds, its prompt included."""

    prefill: float
    decode: float
    first_token_seconds: float


@dataclass(frozen=True)
class Row:
    """One width. `cache_bytes` is what keys and values of all tokens take, `bandwidth_share` what decoding reads per
    second, of what the memory delivers in the same run.
    """

    precision: Precision
    bits_per_weight: float
    weight_bytes: int
    cache_bytes: int
    load_seconds: float
    speed: Speed
    read_bytes_per_token: int
    bandwidth_share: float
    peer_type: str | None = None
    peer: Speed | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "precision": str(self.precision)}


@dataclass(frozen=True)
class Figures:
    """All that was measured; `machine` says where."""

    machine: dict[str, Any]
    rows: list[Row]
    speculation: list[SpeculationRow]

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "results": [row.to_json() for row in self.rows],
            "speculation": [row.to_json() for row in self.speculation],
        }


def measure(
    folder: Path,
    precisions: Sequence[Precision],
    *,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    threads: int | None,
    kv_cache: Precision | str = FLOAT16,
    device: str = "cpu",
    against_llama_cpp: bool = False,
    speculation: bool = True,
    progress: Progress | None = None,
) -> Figures:
    """Measure each width, its GGUF twin in llama.cpp too if asked for, and speculation where there is a tokenizer."""
    if against_llama_cpp:
        import_llama_cpp()
    context = prompt_tokens + new_tokens
    where = choose(device)
    engine = Engine(folder, max(precisions), threads=threads, context=context, kv_cache=kv_cache, device=where)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(engine.weights.model.shape.vocabulary, (prompt_tokens,), generator=generator).tolist()
    runs: dict[tuple[Precision, str], Run] = {}
    peers: list[LlamaCpp] = []
    with tempfile.TemporaryDirectory() as name:
        for precision in precisions:
            runs[precision, "otaro"] = _native(engine, precision)
            if against_llama_cpp:
                twin = export_gguf(folder, Path(name) / f"{precision}.gguf", precision)
                peers.append(LlamaCpp(twin, context=engine.context, threads=engine.threads))
                runs[precision, "llama.cpp"] = peers[-1].run
        speeds: dict[tuple[Precision, str], list[Speed]] = {key: [] for key in runs}
        memory, bandwidths = (GpuBandwidth() if where == CUDA else Bandwidth(engine.threads)), list[float]()
        for number in range(rounds):
            bandwidths.append(memory.measure())
            for place, (key, run) in enumerate(runs.items()):
                speeds[key].append(_one_run(run, prompt, new_tokens))
                if progress is not None:
                    progress(f"measuring {key[0]}", number * len(runs) + place + 1, rounds * len(runs))
        for peer in peers:
            peer.close()
    bandwidth = max(bandwidths)  # what memory can deliver, not what others left of it
    rows = []
    for precision in precisions:
        speed = _medians(speeds[precision, "otaro"])
        start = time.perf_counter()
        loaded = Engine(folder, precision, threads=threads, context=context, kv_cache=kv_cache, device=where)
        load_seconds = time.perf_counter() - start
        size = loaded.memory["weights"]
        packed = sum(matrix.rows * matrix.columns for matrix in set(loaded.weights.model.matrices.values()))
        read = sum(
            matrix.nbytes for (_, role), matrix in loaded.weights.model.matrices.items() if role != MatrixRole.EMBEDDING
        )
        columns = engine.weights.model.shape.hidden
        rows.append(
            Row(
                precision,
                8 * size / packed,
                size,
                loaded.memory["full_cache"],
                load_seconds,
                speed,
                read,
                read * speed.decode / bandwidth,
                block_type(precision, columns).name if against_llama_cpp else None,
                _medians(speeds[precision, "llama.cpp"]) if against_llama_cpp else None,
            )
        )
    speculated: list[SpeculationRow] = []
    if speculation and engine.precision > NARROWEST and (folder / "tokenizer.json").exists():
        engine = Engine(folder, engine.precision, threads=threads, kv_cache=kv_cache, device=where)
        tokenizer = load_tokenizer(folder)
        speculated = measure_speculation(engine, tokenizer, new_tokens=new_tokens, rounds=rounds, progress=progress)
    return Figures(describe(engine.threads, bandwidth, gpu=where == CUDA), rows, speculated)


def _native(engine: Engine, precision: Precision) -> Run:
    """The likeliest token each time, picked where the engine picks it."""
    widths, greedy = engine.weights.widths(precision), Sampling()
    return lambda tokens, position: engine.pick(tokens, position, widths, greedy)


def _one_run(run: Run, prompt: list[int], new_tokens: int) -> Speed:
    if new_tokens < 2:
        raise OtaroError(f"{new_tokens} new tokens are too few to measure: ask for at least 2")
    start = time.perf_counter()
    token = run(prompt, 0)
    first = time.perf_counter() - start
    seconds = []
    for position in range(len(prompt), len(prompt) + new_tokens - 1):
        start = time.perf_counter()
        token = run([token], position)
        seconds.append(time.perf_counter() - start)
    return Speed(len(prompt) / first, 1 / statistics.median(seconds), first)


def _medians(speeds: list[Speed]) -> Speed:
    return Speed(
        *(statistics.median(values) for values in zip(*(asdict(speed).values() for speed in speeds), strict=True))
    )
