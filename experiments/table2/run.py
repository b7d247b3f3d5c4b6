"""Memory and speed at every width against FP16, in the shape of Llama-3-8B: Table 2 of the paper, on one GPU.

    python -m experiments.table2.run --json experiments/table2/h200.json
    python -m experiments.table2.run --shape smollm2-135m --json experiments/table2/h200-smollm2.json
    python -m experiments.table2.run --shape tiny --device plain --tokens 40        # anywhere, in plain torch

Weights are random; what runs them is the engine as it ships: `DeviceWork.run`, a step at a time, its captured graphs,
tokens picked on the device and read back. The FP16 side is the same engine with FP16 weights, whose products are
cuBLAS's. Memory is what torch has allocated. Tokens follow one another behind `--tokens` tokens of context.

    decode     tokens/s of one text, by the clock; `device_seconds` is the graph alone
    share      weights and keys and values read a second, of the fastest reading in this run
    prefill    tokens/s of a prompt of `--tokens`
    together   tokens/s of 16 texts at once, over that of one
    switch     seconds that a step takes more where every step has another width than the one before
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy
import torch

from experiments.table2 import models
from otaro.bench.machine import GpuBandwidth
from otaro.engine.cuda.launches import CUDA, PLAIN, torch_device, unusable
from otaro.engine.cuda.model import DeviceModel
from otaro.engine.cuda.rows import DeviceSession
from otaro.engine.cuda.work import DeviceWork
from otaro.engine.sampling import Sampling, c_sampling
from otaro.engine.session import Step
from otaro.json_file import write_json
from otaro.precision import WIDEST, Precision

TOGETHER = 16
GREEDY = c_sampling(Sampling())


class Measured:
    """A model and the work on it; texts of so many tokens are made up, not run."""

    def __init__(self, model: DeviceModel, tokens: int, steps: int) -> None:
        self.model, self.tokens, self.steps = model, tokens, steps
        self.work = DeviceWork(model)

    def session(self, cache: Precision | None = None) -> DeviceSession:
        session = DeviceSession(self.model, self.tokens + self.steps + 1, cache=cache)
        session.reserve(self.tokens + self.steps + 1)
        if cache is None:
            session.cache.normal_()
        else:
            session.cache.random_(20, 30)  # of which bytes are scales, they are such
        session.ran(self.tokens)
        return session

    def step(self, session: DeviceSession, widths: bytes, before: Step | None = None) -> Step:
        """The token behind a step's, or the first behind the context."""
        if before is None:
            return Step(session, numpy.array([5], dtype=numpy.int32), self.tokens, widths, 1, GREEDY)
        token = numpy.array(before.picked, dtype=numpy.int32)
        return Step(session, token, before.position + 1, widths, 1, GREEDY)

    def decode(self, sessions: list[DeviceSession], widths: list[bytes]) -> float:
        """Seconds of a step of all texts, the widths taking turns."""
        for width in dict.fromkeys(widths):
            self.work.run([self.step(session, width) for session in sessions])
            self.work.run([self.step(session, width) for session in sessions])
        seconds: list[float] = []
        steps: list[Step] = []
        for number in range(self.steps):
            last = steps or [None] * len(sessions)
            width = widths[number % len(widths)]
            start = time.perf_counter()
            steps = [self.step(session, width, before) for session, before in zip(sessions, last, strict=True)]
            self.work.run(steps)
            seconds.append(time.perf_counter() - start)
            if any(step.failed for step in steps):
                raise SystemExit("logits are not finite")
        return statistics.median(seconds) if len(set(widths)) == 1 else statistics.mean(seconds)

    def device_seconds(self, widths: bytes, size: int = 1) -> float | None:
        """Seconds of the captured graph alone."""
        found = [graph for kind, graph in self.work._captured.items() if kind.widths == widths and kind.size == size]
        if not found:
            return None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(self.steps):
            found[-1].graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / self.steps

    def prefill(self, widths: bytes) -> float:
        """Seconds of a prompt."""
        session = DeviceSession(self.model, self.tokens)
        vocabulary = self.model.shape.vocabulary
        tokens = numpy.random.default_rng(0).integers(0, vocabulary, self.tokens, dtype=numpy.int32)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            self.work.run([Step(session, tokens, 0, widths, 1, GREEDY)])
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:])

    def row(self, name: str, widths: bytes, cache: Precision | None) -> dict[str, Any]:
        session = self.session(cache)
        step = self.decode([session], [widths])
        read = models.read_bytes(self.model, widths) + session.cache.nbytes * self.tokens // session.capacity
        row: dict[str, Any] = {
            "name": name,
            "cache": "float16" if cache is None else str(cache),
            "decode_tokens_per_second": 1 / step,
            "device_seconds": self.device_seconds(widths),
            "read_bytes": read,
            "weights_bytes": sum(matrix.nbytes for _, matrix in models.matrices(self.model)),
            "cache_bytes": session.cache.nbytes,
            "allocated_bytes": allocated(),
        }
        print(
            f"{name:5} cache {row['cache']:8} {1 / step:8.1f} tokens/s, {row['allocated_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )
        return row


def allocated() -> int:
    """Bytes that torch has taken for tensors."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def clear() -> None:
    """Between two measurements. What cuBLAS works in goes too: no token is computed with it from packed weights."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def measure(report: dict[str, Any], arguments: argparse.Namespace, device: torch.device) -> None:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    name, tokens, steps, layers = arguments.shape, arguments.tokens, arguments.steps, arguments.layers
    rows: list[dict[str, Any]] = report.setdefault("rows", [])

    def save() -> None:
        if arguments.json is not None:
            write_json(report, arguments.json)

    if device.type == "cuda":
        report["read_bytes_per_second"] = GpuBandwidth().measure()
        clear()
    plain = Measured(models.model(name, models.dense(dtype, device), dtype, device, layers), tokens, steps)
    widths = models.widths_of(plain.model, WIDEST)
    rows.append({**plain.row("FP16", widths, None), "prefill_tokens_per_second": tokens / plain.prefill(widths)})
    rows[-1]["together"] = together(plain, widths, rows[-1])
    save()
    del plain
    clear()
    packed = Measured(models.packed_model(name, dtype, device, layers), tokens, steps)
    if not arguments.quick:
        every = [models.widths_of(packed.model, width) for width in Precision]
        session = packed.session()
        alone = [packed.decode([session], [width]) for width in every]
        report["switch_seconds"] = packed.decode([session], every) - statistics.mean(alone)
        del session
        save()
    for precision in sorted(Precision, reverse=True):
        models.drop_to(packed.model, precision)
        clear()
        widths = models.widths_of(packed.model, precision)
        row = packed.row(str(precision), widths, None)
        if not arguments.quick:
            row["prefill_tokens_per_second"] = tokens / packed.prefill(widths)
            row["together"] = together(packed, widths, row)
        rows.append(row)
        clear()
        for cache in (Precision.E5M8, Precision.E5M4):
            if precision in (Precision.E5M8, Precision.E5M4) and not (arguments.quick and cache == Precision.E5M8):
                rows.append(packed.row(str(precision), widths, cache))
                clear()
        save()
    rate = max([report.get("read_bytes_per_second", 0.0), *(row["read_bytes"] * speed(row) for row in rows)])
    for row in rows:
        row["share"] = row["read_bytes"] * speed(row) / rate
        row["speedup"] = speed(row) / speed(rows[0])
        row["memory_saved"] = 1 - row["allocated_bytes"] / max(rows[0]["allocated_bytes"], 1)
    save()


def speed(row: dict[str, Any]) -> float:
    return float(row["decode_tokens_per_second"])


def together(measured: Measured, widths: bytes, alone: dict[str, Any]) -> float:
    """The gain of 16 texts at once."""
    step = measured.decode([measured.session() for _ in range(TOGETHER)], [widths])
    clear()
    return TOGETHER / step / speed(alone)


def show(report: dict[str, Any]) -> None:
    print("width  cache     tokens/s  x FP16  share  prefill  16 texts     GiB  saved")
    for row in report["rows"]:
        prefill, many = row.get("prefill_tokens_per_second"), row.get("together")
        print(
            f"{row['name']:6} {row['cache']:8} {speed(row):9.1f} {row['speedup']:7.2f} {row['share']:6.0%} "
            f"{'' if prefill is None else f'{prefill:8.0f}':>8} {'' if many is None else f'{many:9.1f}':>9} "
            f"{row['allocated_bytes'] / 2**30:7.2f} {row['memory_saved']:6.1%}"
        )
    if "switch_seconds" in report:
        print(f"switching costs {1e3 * report['switch_seconds']:.3f} ms")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=models.SHAPES, default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--tokens", type=int, default=2000, help="of context, and of the prompt")
    parser.add_argument("--steps", type=int, default=40, help="tokens that are measured")
    parser.add_argument("--device", choices=(CUDA, PLAIN), default=CUDA)
    parser.add_argument("--quick", action="store_true", help="decoding of one text alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    if arguments.device == CUDA and (reason := unusable()) is not None:
        raise SystemExit(f"no GPU can be measured here: {reason}")
    device = torch_device(arguments.device)
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": os.environ.get("OTARO_COMMIT") or git.stdout.strip(),
        **{name: getattr(arguments, name) for name in ("shape", "layers", "tokens", "steps")},
    }
    if device.type == "cuda":
        start = time.perf_counter()
        models.compile_kernels(device.index or 0)
        report["compile_seconds"] = time.perf_counter() - start
        print(f"compiled in {report['compile_seconds']:.0f} s", flush=True)
    measure(report, arguments, device)
    show(report)


if __name__ == "__main__":
    main()
