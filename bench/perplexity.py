"""Perplexity of the native engine, and of GGUF twins in llama.cpp, beside the torch reference, on the same text.

    python bench/perplexity.py PACKED IDS.npy [--windows 24] [--seconds 1200] [--kv-cache float16,E5M8] [--json FILE]
    python bench/perplexity.py PACKED IDS.npy --against llama.cpp --json bench/perplexity.json
    python bench/perplexity.py PACKED IDS.npy --eval --window 1024 --windows 3 --json bench/perplexity_eval.json

IDS.npy holds the tokens of a text. Windows of it that do not overlap are drawn without repetition, the same in every
run, so that builds of the library can be compared window by window. In each, every token but the first
is predicted from those before it. Ways take turns on a window, until the windows or the seconds are used up.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch import Tensor

import otaro
from otaro.bench.llama_cpp import LlamaCpp
from otaro.engine.engine import FLOAT16, Engine
from otaro.evaluate.backend import NativeBackend
from otaro.export import export_gguf
from otaro.ops import cpu
from otaro.precision import Precision, parse_precisions


def cross_entropy(logits: Tensor, ids: list[int]) -> float:
    """The mean over a window, in nats."""
    return float(torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(ids[1:])))


def native(engine: Engine, precision: Precision) -> Callable[[list[int]], Tensor]:
    return lambda ids: torch.from_numpy(engine.logits(ids, precision))


def evaluated(backend: NativeBackend, precision: Precision) -> Callable[[list[int]], Tensor]:
    return lambda ids: torch.cat([logits for _, _, logits in backend.logits(torch.tensor(ids), [precision])])


def reference(model: torch.nn.Module, precision: Precision) -> Callable[[list[int]], Tensor]:
    def run(ids: list[int]) -> Tensor:
        model.set_precision(precision)
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids])).logits[0]

    return run


def twin(
    folder: Path, precision: Precision, place: Path, window: int, threads: int, exact: bool
) -> Callable[[list[int]], Tensor]:
    peer = LlamaCpp(export_gguf(folder, place, precision, exact=exact), context=window, threads=threads)
    return lambda ids: torch.from_numpy(peer.logits(ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--precisions", default="all")
    parser.add_argument("--kv-cache", default=FLOAT16, help="one or several, with commas between them")
    parser.add_argument("--against", choices=["llama.cpp"], help="run each width's GGUF twin too")
    parser.add_argument("--exact", action="store_true", help="twins in types with which llama.cpp rounds least")
    parser.add_argument("--eval", action="store_true", help="run the engine as otaro eval does too")
    parser.add_argument("--no-torch", action="store_true", help="leave the reference out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ids = numpy.load(arguments.ids).astype(numpy.int64)
    count = len(ids) // arguments.window
    chosen = numpy.random.default_rng(0).permutation(count)[: arguments.windows].tolist()

    ways: dict[str, Callable[[list[int]], Tensor]] = {}
    precisions = parse_precisions(arguments.precisions)
    engines = {
        cache: Engine(arguments.packed, context=arguments.window, threads=arguments.threads, kv_cache=cache)
        for cache in arguments.kv_cache.split(",")
    }
    model = None if arguments.no_torch else otaro.load(arguments.packed)
    backend = NativeBackend(arguments.packed, max(precisions)) if arguments.eval else None
    twins = tempfile.TemporaryDirectory()
    for precision in precisions:
        if model is not None:
            ways[f"{precision} torch"] = reference(model, precision)
        for cache, engine in engines.items():
            ways[f"{precision} native {cache}"] = native(engine, precision)
        if backend is not None:
            ways[f"{precision} native in eval"] = evaluated(backend, precision)
        if arguments.against:
            place = Path(twins.name) / f"{precision}.gguf"
            ways[f"{precision} llama.cpp"] = twin(
                arguments.packed, precision, place, arguments.window, arguments.threads, arguments.exact
            )

    losses: dict[str, list[float]] = {name: [] for name in ways}
    start = time.monotonic()
    for number in chosen:
        if time.monotonic() - start > arguments.seconds:
            break
        window = ids[number * arguments.window : (number + 1) * arguments.window].tolist()
        for name, run in ways.items():
            losses[name].append(cross_entropy(run(window), window))
    done = len(next(iter(losses.values())))
    print(f"{done} windows of {arguments.window} tokens, {cpu.isa()}, {time.monotonic() - start:.0f} s")
    results = []
    for name, values in losses.items():
        # Against the first way at the same width; the error is that of the mean difference.
        first = next(other for key, other in losses.items() if key.split()[0] == name.split()[0])
        differences = [one - other for one, other in zip(values, first, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(done) if done > 1 else math.nan
        perplexity, change = math.exp(statistics.fmean(values)), math.expm1(statistics.fmean(differences))
        print(f"{name:24s} {perplexity:9.4f}  {change:+.4%} ± {error:.4%}")
        results.append({"way": name, "perplexity": perplexity, "change": change, "error": error, "losses": values})
    if arguments.json is not None:
        figures = {
            "folder": arguments.packed.name,
            "text": arguments.ids.name,
            "window": arguments.window,
            "windows": chosen[:done],
            "results": results,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
