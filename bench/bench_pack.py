"""How fast the native core encodes, against the torch codec and against the memory.

    python bench/bench_pack.py [--threads 2] [--repeats 7] [--json FILE]

pack        weights to planes against ``packing.pack(sefp.encode(...))``; "nearest" has no scale to choose
quantize    weights to their values at E5M4 against encoding and decoding (what a training step does)
dequantize  planes to values at E5M4 against unpacking and decoding

Both sides run on the same threads, by turns, and the medians of one run are compared. The share of the memory's speed
counts every byte an operation must read and write, over the speed of a plain copy measured by the same turns. Results
go into tensors allocated anew by each call, as in use; so does the copy. For large tensors that means fresh pages from
the system, which then take most of the time of either.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from otaro import packing, sefp
from otaro.ops import cpu
from otaro.precision import WIDEST, Precision
from otaro.sefp import Format

SHAPES = ((576, 1536), (4096, 4096))
DTYPES = (torch.float32, torch.bfloat16)
FORMAT, NEAREST = Format(), Format("nearest")
WIDTH = Precision.E5M4
TARGET = 10.0


@dataclass(frozen=True)
class Row:
    operation: str
    shape: tuple[int, ...]
    dtype: str
    native_seconds: float
    torch_seconds: float
    moved_bytes: int
    copy_gigabytes_per_second: float

    @property
    def ratio(self) -> float:
        return self.torch_seconds / self.native_seconds

    @property
    def gigabytes_per_second(self) -> float:
        return self.moved_bytes / self.native_seconds / 1e9


def medians(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each side, the sides taking turns so that a busy machine slows all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if repeat:  # the first turn warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def operations(weight: Tensor) -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """For each operation: the native call, the torch call, and the bytes it must move."""
    columns, dtype = weight.shape[-1], weight.dtype
    planes, _ = cpu.pack(weight, FORMAT)
    full = weight.numel() * weight.element_size()
    narrow = planes.base.numel() + planes.scale.numel() + planes.bits[0].numel() * (WIDTH.mantissa - 3)
    wide = planes.base.numel() + planes.scale.numel() + sum(plane.numel() for plane in planes.bits)
    return {
        "pack": (
            lambda: cpu.pack(weight, FORMAT),
            lambda: packing.pack(sefp.encode(weight, WIDEST, FORMAT)),
            full + wide,
        ),
        "pack, nearest": (
            lambda: cpu.pack(weight, NEAREST),
            lambda: packing.pack(sefp.encode(weight, WIDEST, NEAREST)),
            full + wide,
        ),
        "quantize": (
            lambda: cpu.quantize(weight, WIDTH, FORMAT),
            lambda: sefp.decode(sefp.encode_unchecked(weight, WIDTH, FORMAT), dtype),
            2 * full,
        ),
        "dequantize": (
            lambda: cpu.dequantize(planes, columns, WIDTH, FORMAT, dtype),
            lambda: sefp.decode(packing.unpack(planes, columns, WIDTH, FORMAT), dtype),
            narrow + full,
        ),
    }


def measure(repeats: int) -> list[Row]:
    rows = []
    for shape in SHAPES:
        for dtype in DTYPES:
            weight = (torch.randn(shape) * 0.02).to(dtype)
            full = weight.numel() * weight.element_size()
            for name, (native, reference, moved) in operations(weight).items():
                seconds = medians({"native": native, "torch": reference, "copy": weight.clone}, repeats)
                copy = 2 * full / seconds["copy"] / 1e9
                kind = str(dtype).removeprefix("torch.")
                rows.append(Row(name, shape, kind, seconds["native"], seconds["torch"], moved, copy))
    return rows


def table(rows: list[Row], threads: int) -> Table:
    result = Table(
        title=f"native core ({cpu.isa()}) against torch, {threads} threads, milliseconds",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("operation", "shape", "dtype"):
        result.add_column(column, no_wrap=True)
    for column in ("native", "torch", "ratio", "GB/s", "of copy"):
        result.add_column(column, justify="right")
    for row in rows:
        speed, copy = row.gigabytes_per_second, row.copy_gigabytes_per_second
        result.add_row(
            *(row.operation, "×".join(map(str, row.shape)), row.dtype),
            *(f"{1e3 * row.native_seconds:.2f}", f"{1e3 * row.torch_seconds:.1f}", f"{row.ratio:.0f}×"),
            *(f"{speed:.1f}", f"{speed / copy:.0%}"),
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = measure(arguments.repeats)
    console = Console()
    console.print(table(rows, arguments.threads))
    worst = min(row.ratio for row in rows if row.operation.startswith("pack"))
    console.print(f"pack: at least {worst:.0f}× the torch codec (target {TARGET:.0f}×)")
    if arguments.json:
        record: dict[str, object] = {"isa": cpu.isa(), "threads": arguments.threads, "repeats": arguments.repeats}
        record["rows"] = [{**asdict(row), "ratio": row.ratio} for row in rows]
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
