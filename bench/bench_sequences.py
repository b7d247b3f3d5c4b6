"""Tokens a second of several texts at once, at each width; and what picking a token costs.

    python bench/bench_sequences.py PACKED [--threads 2] [--rounds 5] [--json bench/bench_sequences.json]

Every round goes through all widths and numbers of texts in turn, through the scheduler: prompts of random tokens, all
different, greedy tokens. Counted are the tokens between the moment when the last text has its first token and the one
when the first text has its last: all of them run then. Medians over the rounds, and the gain over one text.

Picking is measured over 128,000 logits at temperature 0.7 and top-p 0.95, natively and, beside it, by sorting in numpy
as the definition has it; the best of many calls, Python's part of the call included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from otaro.bench.machine import Bandwidth, describe
from otaro.engine.engine import Engine
from otaro.engine.sampling import Sampling, c_sampling, sample
from otaro.engine.scheduler import Request, Scheduler, Token
from otaro.precision import Precision

NUMBERS = (1, 2, 4, 8, 16)
VOCABULARY = 128_000
DRAWN = Sampling(0.7, top_p=0.95, seed=1)


class Clock:
    """When the tokens of a text came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.over = threading.Event()

    def __call__(self, token: Token | None) -> None:
        self.times.append(time.perf_counter())
        if token is None:
            self.over.set()


def run(engine: Engine, precision: Precision, number: int, prompt_tokens: int, new_tokens: int) -> float:
    """Tokens a second while `number` texts run."""
    scheduler = Scheduler(engine, most_sequences=number, kept=0)
    random = numpy.random.default_rng(number)
    vocabulary = engine.weights.model.shape.vocabulary
    clocks = [Clock() for _ in range(number)]
    for clock in clocks:
        prompt = random.integers(0, vocabulary, prompt_tokens).tolist()
        scheduler.submit(Request(prompt, new_tokens, precision=precision), clock)
    for clock in clocks:
        clock.over.wait()
    scheduler.close()
    times = [clock.times[:-1] for clock in clocks]  # without the end
    start, end = max(own[0] for own in times), min(own[-1] for own in times)
    return sum(start < moment <= end for own in times for moment in own) / (end - start)


def by_sorting(logits: Any, draw: float) -> int:
    """A token as the definition has it."""
    weights = numpy.exp((logits.astype(numpy.float64) - float(logits.max())) / DRAWN.temperature)
    order = numpy.argsort(-weights, kind="stable")
    sums = numpy.cumsum(weights[order])
    weights[order[int(numpy.searchsorted(sums, DRAWN.top_p * sums[-1])) + 1 :]] = 0
    sums = numpy.cumsum(weights)
    return int(numpy.searchsorted(sums, draw * sums[-1], side="right"))


def best(call: Callable[[int], Any], times: int) -> float:
    seconds = []
    for number in range(times):
        start = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def picking() -> list[dict[str, Any]]:
    """Seconds to pick a token from logits of several spreads; those of a language model are wide."""
    random, native = numpy.random.default_rng(0), c_sampling(DRAWN)
    rows = []
    for spread in (1.0, 3.0, 6.0):
        logits = (spread * random.standard_normal(VOCABULARY)).astype(numpy.float32)
        rows.append(
            {
                "logits": VOCABULARY,
                "standard_deviation": spread,
                "native_seconds": best(lambda place, row=logits: sample(native, row, position=place), 50),  # type: ignore[misc]
                "numpy_seconds": best(lambda place, row=logits: by_sorting(row, place / 5), 5),  # type: ignore[misc]
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--precision", action="append", help="only this width; may come several times")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    engine = Engine(arguments.folder, threads=arguments.threads)
    widths = [Precision(name) for name in arguments.precision or engine.weights.precisions]
    speeds: dict[tuple[Precision, int], list[float]] = {(width, number): [] for width in widths for number in NUMBERS}
    load = os.getloadavg()[0]
    for _ in range(arguments.rounds):
        for width, number in speeds:
            speed = run(engine, width, number, arguments.prompt_tokens, arguments.new_tokens)
            speeds[width, number].append(speed)
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    rows = [
        {"precision": str(width), "texts": number, "tokens_per_second": speed, "gain": speed / medians[width, 1]}
        for (width, number), speed in medians.items()
    ]
    for row in rows:
        print("{precision} {texts:3d} texts {tokens_per_second:8.1f} tokens/s {gain:5.2f}×".format(**row))
    picks = picking()
    for pick in picks:
        native, by_numpy = 1e3 * pick["native_seconds"], 1e3 * pick["numpy_seconds"]
        print(f"picking, logits of deviation {pick['standard_deviation']}: {native:.2f} ms, numpy {by_numpy:.1f} ms")
    if arguments.json:
        machine = {**describe(engine.threads, Bandwidth(engine.threads).measure()), "load_before": load}
        settings = {name: getattr(arguments, name) for name in ("rounds", "prompt_tokens", "new_tokens")}
        record = {"machine": machine, "settings": settings, "results": rows, "picking": picks}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
