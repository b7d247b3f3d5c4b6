"""A packed folder on a GPU: speed, agreement with torch, several texts at once, switching, speculation.

    python bench/gpu_engine.py smollm2-packed --tokens wikitext-test.npy --json bench/gpu_engine.json

Each part stands for itself: one that fails is recorded with its error, and what came before is in the file. `--tokens`
are the ids of a text (.npy); without it, perplexity is left out and prompts are random.

    decode        greedy tokens/s of `Engine.tokens` at every width, and of drawn ones at the widest
    agreement     perplexity at every width, the engine's over that of transformers with packed layers (otaro.load)
    prompt        tokens/s of a prompt of `--prompt` tokens at every width
    together      tokens/s of 16 texts under the scheduler, over that of one
    switch        seconds more a token where the width changes at every token
    speculation   E5M8 with E5M3 drafts against E5M8 alone, the same tokens
    memory        bytes at every width after `drop_to`
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

import otaro
from otaro.bench.machine import GpuBandwidth
from otaro.engine.cuda.launches import CUDA, PLAIN, describe, unusable
from otaro.engine.engine import Engine
from otaro.engine.sampling import Sampling
from otaro.engine.scheduler import Request, Scheduler
from otaro.json_file import write_json
from otaro.precision import NARROWEST, WIDEST, Precision

TOGETHER = 16
WINDOW = 1024


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder, self.device, self.new = arguments.folder, arguments.device, arguments.new
        self.engine = Engine(self.folder, device=self.device)
        vocabulary = self.engine.weights.model.shape.vocabulary
        given = arguments.tokens
        random = numpy.random.default_rng(0).integers(0, vocabulary, 4096)
        self.text: list[int] = [int(token) for token in (random if given is None else numpy.load(given)[: 1 << 15])]
        self.real = given is not None
        self.prompt = self.text[: min(arguments.prompt, self.engine.context - self.new - 1)]
        self.windows = arguments.windows

    def seconds_a_token(self, precision: Precision, **settings: Any) -> float:
        """The median over tokens, the prompt and the first few, in which graphs are captured, left out."""
        self.engine.precision = precision
        times = []
        for _ in range(2):
            made = self.engine.tokens(self.prompt[:64], max_new_tokens=self.new, **settings)
            next(made)
            times = list(self.between(made))
        return statistics.median(times)

    @staticmethod
    def between(tokens: Iterator[int]) -> Iterator[float]:
        last = time.perf_counter()
        for _ in tokens:
            now = time.perf_counter()
            yield now - last
            last = now

    def decode(self) -> dict[str, Any]:
        speeds = {str(width): 1 / self.seconds_a_token(width) for width in Precision}
        drawn = Sampling(0.8, top_k=40, top_p=0.95, seed=1)
        return {**speeds, "E5M8 drawn": 1 / self.seconds_a_token(WIDEST, sampling=drawn)}

    def agreement(self) -> dict[str, Any]:
        if not self.real:
            return {}
        device = None if self.device == PLAIN else "cuda"
        model = otaro.load(self.folder, device=device, dtype=torch.float32)
        length = min(WINDOW, self.engine.context)
        windows = [self.text[start : start + length] for start in range(0, self.windows * length, length)]
        found = {}
        for width in Precision:
            model.set_precision(width)
            losses: dict[str, list[float]] = {"engine": [], "torch": []}
            for window in windows:
                target = torch.tensor(window[1:])
                ours = torch.from_numpy(self.engine.logits(window, width)[:-1])
                with torch.no_grad():
                    theirs = model(torch.tensor([window], device=model.device)).logits[0, :-1].float().cpu()
                for name, logits in (("engine", ours), ("torch", theirs)):
                    losses[name].append(float(torch.nn.functional.cross_entropy(logits, target)))
            engine, reference = (math.exp(statistics.mean(losses[name])) for name in ("engine", "torch"))
            found[str(width)] = {"engine": engine, "torch": reference, "difference": engine / reference - 1}
        return found

    def prompts(self) -> dict[str, float]:
        speeds = {}
        for width in Precision:
            widths, seconds = self.engine.weights.widths(width), []
            for _ in range(4):
                start = time.perf_counter()
                self.engine.pick(self.prompt, 0, widths, Sampling())
                seconds.append(time.perf_counter() - start)
            speeds[str(width)] = len(self.prompt) / statistics.median(seconds[1:])
        return speeds

    def together(self) -> dict[str, float]:
        found = {}
        for width in (Precision.E5M8, Precision.E5M4):
            rates = []
            for count in (1, TOGETHER, 1, TOGETHER):  # the second time with graphs that are there
                scheduler = Scheduler(self.engine, most_sequences=count, kept=0)
                requests = [Request(self.text[9 * n : 9 * n + 40], self.new, precision=width) for n in range(count)]
                start = time.perf_counter()
                running = [scheduler.submit(request) for request in requests]
                made = sum(len(list(text)) for text in running)
                rates.append(made / (time.perf_counter() - start))
                scheduler.close()
            found[str(width)] = rates[3] / rates[2]
        return found

    def switch(self) -> float:
        alone = [self.seconds_a_token(width) for width in (WIDEST, NARROWEST)]
        times = []
        for _ in range(2):
            made = self.engine.tokens(self.prompt[:64], max_new_tokens=self.new)
            next(made)
            for width in itertools.cycle((WIDEST, NARROWEST)):
                self.engine.precision = width
                start = time.perf_counter()
                if next(made, None) is None:
                    break
                times.append(time.perf_counter() - start)
        return statistics.median(times[len(times) // 2 :]) - statistics.mean(alone)

    def speculation(self) -> dict[str, Any]:
        self.engine.precision = WIDEST
        texts, seconds = {}, {}
        for draft in (None, NARROWEST, None, NARROWEST):
            start = time.perf_counter()
            texts[draft] = list(self.engine.tokens(self.prompt[:64], max_new_tokens=self.new, draft=draft))
            seconds[draft] = time.perf_counter() - start
        counts = self.engine.speculation
        return {
            "same": texts[None] == texts[NARROWEST],
            "speedup": seconds[None] / seconds[NARROWEST],
            "acceptance": counts.acceptance,
            "drafted": counts.drafted,
            "repeated": counts.repeated,
        }

    def memory(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for width in sorted(Precision, reverse=True):
            self.engine.drop_to(width)
            allocated = torch.cuda.memory_allocated() if self.device == CUDA else 0
            found[str(width)] = {**self.engine.memory, "allocated": allocated}
        start = time.perf_counter()
        self.engine.raise_to(WIDEST)
        found["raise_seconds"] = time.perf_counter() - start
        return found


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=Path, help="the ids of a text, .npy")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--windows", type=int, default=16, help="of perplexity")
    parser.add_argument("--device", choices=(CUDA, PLAIN), default=CUDA)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    if arguments.device == CUDA and (reason := unusable()) is not None:
        raise SystemExit(f"no GPU can be measured here: {reason}")
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    report: dict[str, Any] = {
        "device": describe(arguments.device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": os.environ.get("OTARO_COMMIT") or git.stdout.strip(),
        "folder": arguments.folder.resolve().name,
    }
    if arguments.device == CUDA:
        report["read_bytes_per_second"] = GpuBandwidth().measure()
    start = time.perf_counter()
    bench = Bench(arguments)
    report["load_seconds"] = time.perf_counter() - start
    parts: dict[str, Callable[[], Any]] = {
        "decode": bench.decode,
        "prompt": bench.prompts,
        "together": bench.together,
        "switch": bench.switch,
        "speculation": bench.speculation,
        "agreement": bench.agreement,
        "memory": bench.memory,
    }
    for name, part in parts.items():
        start = time.perf_counter()
        try:
            report[name] = part()
        except Exception as error:  # the parts behind it are still worth measuring
            report[name] = {"error": f"{type(error).__name__}: {error}"}
        print(f"{name} ({time.perf_counter() - start:.1f} s): {report[name]}", flush=True)
        if arguments.json is not None:
            write_json(report, arguments.json)


if __name__ == "__main__":
    main()
