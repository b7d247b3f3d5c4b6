"""Products with SEFP weights on a GPU against cuBLAS in fp16, on the shapes of Llama-3-8B.

    python bench/gpu_matvec.py --json bench/gpu_matvec.json

First every width's products and values are compared with the codec in float64. Then, for each shape, batch and width,
the time of one product: CUDA graphs of many products that go round among copies of the weight, so that no byte comes
from the L2 cache; medians of replays. Every pair is measured with the plan that ships, then, as long as `--seconds`
last, with others, and the best is named. "share" is the weight's bytes a second, as a share of the fastest reading in
this run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from otaro.json_file import write_json
from otaro.ops import cuda, reference
from otaro.ops.cuda import calls, compiler
from otaro.ops.cuda.layout import Fragments, from_planes
from otaro.precision import Precision
from otaro.sefp import Format

SHAPES = {
    "o": (4096, 4096),
    "up": (14336, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
    "k": (1024, 4096),
    "qkv": (6144, 4096),
    "gate and up": (28672, 4096),
}
LARGE = ("up", "down", "head")
FIRST = (Precision.E5M3, Precision.E5M4, Precision.E5M8)
BEYOND_CACHE = 200 * 2**20
Launch = Callable[[int], Any]


def build_kernels(index: int, columns: tuple[int, ...]) -> float:
    """Compile every kernel at once, by as many threads as there are processors; seconds it took."""
    started = time.perf_counter()
    major, minor = torch.cuda.get_device_capability(index)
    jobs: list[tuple[str, tuple[tuple[str, int], ...]]] = [("decode", ())]
    for extra, count in itertools.product(range(-1, 6), columns):
        # The form that reads its width on the device is measured at batch 1 alone.
        if extra >= 0 or count == 1:
            threads = 32 * calls.most_warps(count)
            definitions = (
                *(("OTARO_COLUMNS", count), ("OTARO_EXTRA", extra)),
                *(("OTARO_GATED", 0), ("OTARO_THREADS", threads)),
            )
            jobs.append(("matvec", definitions))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: compiler.compiled(job[0], f"sm_{major}{minor}", job[1]), jobs))
    return time.perf_counter() - started


def check(device: torch.device) -> dict[str, Any]:
    """Products and values against the codec: the largest error relative to the largest result, and what differs."""
    format, worst, wrong = Format(), 0.0, []
    generator = torch.Generator(device=device).manual_seed(0)
    for rows, columns, batch, dtype in [
        (16, 256, 1, torch.float16),
        (100, 770, 1, torch.bfloat16),
        (4096, 4096, 1, torch.float16),
        (200, 14336, 1, torch.bfloat16),
        (333, 1000, 7, torch.float16),
        (4099, 4096, 8, torch.bfloat16),
    ]:
        weight = torch.randn(rows, columns, generator=generator, device=device) * 0.02
        planes, _ = reference.pack(weight, format)
        fragments = from_planes(planes, (rows, columns), format)
        x = torch.randn(batch, columns, generator=generator, device=device).to(dtype)
        for precision in Precision:
            values = reference.dequantize(planes, columns, precision, format, torch.float32)
            if not torch.equal(cuda.dequantize(fragments, precision, torch.float32), values):
                wrong.append(f"values {rows}x{columns} {precision}")
            wanted = x.double() @ values.double().T
            try:
                result = cuda.linear(x, fragments, precision, None)
            except RuntimeError as failure:
                wrong.append(f"product {rows}x{columns} batch {batch} {precision}: {failure}")
                continue
            error = float((result.double() - wanted).abs().max() / wanted.abs().max())
            worst = max(worst, error / (2**-11 if dtype == torch.float16 else 2**-8))
            if not error < (2**-10 if dtype == torch.float16 else 2**-7):
                wrong.append(f"product {rows}x{columns} batch {batch} {precision}: {error:.1e}")
            if not torch.equal(result, cuda.linear(x, fragments, precision, None)):
                wrong.append(f"two calls differ: {rows}x{columns} {precision}")
    return {"largest_error_in_roundings": worst, "wrong": wrong}


def random_fragments(rows: int, columns: int, device: torch.device) -> Fragments:
    tiles, units = -(-rows // 16), -(-columns // 256)

    def plane(size: int) -> torch.Tensor:
        return torch.randint(0, 256, (tiles, units, size), dtype=torch.uint8, device=device)

    scale = torch.randint(20, 30, (tiles, units, 64), dtype=torch.uint8, device=device)
    return Fragments(plane(2048), tuple(plane(512) for _ in range(5)), scale, (rows, columns), 64)


def seconds_each(launch: Launch, copies: int, replays: int = 7) -> float:
    """Seconds of one launch: a graph of them, at least 24, each on the next copy."""
    count = max(copies, 24 // copies * copies, copies)
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(count):
            launch(step % copies)
    graph.replay()
    times = []
    for _ in range(replays):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]) / 1e3 / count)
    return statistics.median(times)


def product_launch(
    weights: list[Fragments], x: torch.Tensor, extra: int, overlap: bool, dynamic: bool, choices: dict[str, int]
) -> tuple[Launch, calls.Plan]:
    rows = weights[0].rows
    index, batch = x.device.index or 0, x.shape[0]
    kernel, plan = cuda.launch_plan(index, rows, weights[0].base.shape[1], extra, batch, dynamic, **choices)
    y = x.new_empty(batch, rows)
    width = torch.tensor([3 + extra], dtype=torch.int32, device=x.device) if dynamic else None
    prepared = [calls.matvec_call(x, weight, extra, None, y, plan, width) for weight in weights]
    blocks, shared = plan.split * plan.clusters, plan.shared_bytes(rows)

    def launch(copy: int, keep: Any = (weights, x, y, width)) -> None:
        kernel.launch(prepared[copy], blocks, plan.threads, shared, plan.split, overlap)

    return launch, plan


def weight_bytes(rows: int, columns: int, extra: int) -> int:
    return -(-rows // 16) * -(-columns // 256) * calls.unit_bytes(extra)


def plans_to_try(units: int, columns: int) -> list[dict[str, int]]:
    """Ways to divide a product that are worth a measurement, the likeliest first."""
    most = calls.most_warps(columns)
    splits = [split for split in (1, 2, 4, 7, 8) if -(-units // split) <= most and split <= units]
    return [{"split": split, "tiles": tiles} for tiles, split in itertools.product((1, 2, 4), splits)]


def measure_width(
    entry: dict[str, Any], weights: list[Fragments], x: torch.Tensor, precision: Precision, deadline: float
) -> dict[str, Any]:
    """The time with the plan that ships and, until the deadline, with others."""
    extra = precision.mantissa - 3
    size = weight_bytes(entry["rows"], entry["columns"], extra)
    used = weights[: -(-BEYOND_CACHE // size)]
    tried: dict[str, float] = {}
    failed: list[str] = []

    def attempt(label: str, overlap: bool = False, dynamic: bool = False, **choices: int) -> None:
        try:
            launch, plan = product_launch(used, x, extra, overlap, dynamic, choices)
            label += f": split {plan.split}, {plan.warps} warps, {plan.tiles} tiles, {plan.stages} stages"
            tried[f"{label}, {plan.clusters} clusters"] = seconds_each(launch, len(used)) * 1e6
        except (ValueError, RuntimeError) as error:
            failed.append(f"{label} {choices}: {error}")

    attempt("shipped")
    shipped = next(iter(tried.values()), float("nan"))
    attempt("overlapping", overlap=True)
    if precision in FIRST:
        if x.shape[0] == 1:
            attempt("width on the device", dynamic=True)
        for choices in plans_to_try(weights[0].base.shape[1], calls.kernel_columns(x.shape[0])):
            if time.perf_counter() < deadline:
                attempt("tried", **choices)
    plain = {label: taken for label, taken in tried.items() if "overlapping" not in label}
    best = min(plain, key=plain.__getitem__, default="none")
    return {
        "us": shipped,
        "speedup": entry["cublas_us"] / shipped,
        "best_us": plain.get(best),
        "best": best,
        "bytes_per_second": size / (shipped / 1e6),
        "tried": tried,
        "failed": failed,
    }


def measure(shapes: list[str], seconds: float, device: torch.device) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    big = torch.ones(2**29, dtype=torch.float32, device=device)
    rates = [big.numel() * 4 / seconds_each(lambda copy, big=big: big.sum(), 1)]
    del big
    for name in shapes:
        deadline = time.perf_counter() + seconds / len(shapes)
        rows, columns = SHAPES[name]
        count = -(-BEYOND_CACHE // (2 * rows * columns))
        matrices = [torch.randn(rows, columns, dtype=torch.float16, device=device) * 0.02 for _ in range(count)]
        weights = [
            random_fragments(rows, columns, device) for _ in range(-(-BEYOND_CACHE // weight_bytes(rows, columns, 0)))
        ]
        for batch in (1, 8):
            x = torch.randn(batch, columns, dtype=torch.float16, device=device)
            taken = seconds_each(lambda copy, m=matrices, x=x: torch.nn.functional.linear(x, m[copy]), count)
            rates.append(2 * rows * columns / taken)
            entry = {"shape": name, "rows": rows, "columns": columns, "batch": batch, "cublas_us": taken * 1e6}
            entry["widths"] = {}
            results.append(entry)
            for precision in [*FIRST, *(width for width in Precision if width not in FIRST)]:
                width = measure_width(entry, weights, x, precision, deadline)
                entry["widths"][str(precision)] = width
                rates.append(width["bytes_per_second"])
                show(entry, precision)
        del matrices, weights
    rate = max(rate for rate in rates if rate == rate)
    for entry in results:
        entry["cublas_share"] = 2 * entry["rows"] * entry["columns"] / (entry["cublas_us"] / 1e6) / rate
        for width in entry["widths"].values():
            width["share"] = width["bytes_per_second"] / rate
    return {"read_bytes_per_second": rate, "sum_bytes_per_second": rates[0], "results": results}


def show(entry: dict[str, Any], precision: Precision) -> None:
    width = entry["widths"][str(precision)]
    overlap = next((taken for label, taken in width["tried"].items() if "overlapping" in label), float("nan"))
    print(
        f"{entry['shape']:11} batch {entry['batch']} {precision} cuBLAS {entry['cublas_us']:6.1f} us, "
        f"ours {width['us']:6.2f} us {width['speedup']:4.2f}x {width['bytes_per_second'] / 1e12:4.2f} TB/s, "
        f"overlapping {overlap:6.2f}, best {width['best_us'] or 0:6.2f} ({width['best']}) {' '.join(width['failed'])}",
        flush=True,
    )


def decoding(device: torch.device) -> dict[str, float]:
    """Bytes a second of decoding a whole weight to fp16, read and written, at three widths."""
    weight = random_fragments(14336, 4096, device)
    rates = {}
    for precision in FIRST:
        taken = seconds_each(lambda copy, p=precision: cuda.dequantize(weight, p, torch.float16), 1, 3)
        size = weight_bytes(14336, 4096, precision.mantissa - 3) + 2 * 14336 * 4096
        rates[str(precision)] = size / taken
        print(f"decoding {precision}: {size / taken / 1e12:.2f} TB/s", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--seconds", type=float, default=25.0, help="time for the measurements, compilation aside")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    if (reason := compiler.available(device)) is not None:
        raise SystemExit(f"the CUDA kernels cannot run here: {reason}")
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    commit = os.environ.get("OTARO_COMMIT") or git.stdout.strip()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit,
    }
    report["compile_seconds"] = build_kernels(0, (1, 8))
    print(f"compiled in {report['compile_seconds']:.1f} s", flush=True)
    report["check"] = check(device)
    print(report["check"], flush=True)
    report |= measure(arguments.shapes.split(","), arguments.seconds, device)
    report["decoding_bytes_per_second"] = decoding(device)
    met = {"E5M3": 2.6, "E5M4": 2.3, "E5M8": 1.45}
    for entry in report["results"]:
        if entry["shape"] in LARGE and entry["batch"] == 1:
            for width, wanted in met.items():
                reached = entry["widths"][width]["speedup"]
                print(f"{entry['shape']} {width}: {reached:.2f}x, wanted {wanted}x")
    if arguments.json is not None:
        write_json(report, arguments.json)


if __name__ == "__main__":
    main()
