"""How fast the Triton kernels quantise weights, as a share of what the GPU's memory delivers.

    python bench/gpu_kernels.py --shape smollm2 --json bench/gpu_kernels.json

Compares the kernel with the torch codec bit for bit first, bfloat16 included, tiers and known scales too. Then for
all weights of a model's shape: E5M8 as in an update without tiers; with tiers E5M8 (scales are found), E5M4 and E5M3
(scales are known). Bytes are those that must be read and written at least; the limit is what copying 1 GiB reaches in
the same run. Medians over interleaved rounds. `--search` tries sizes of blocks.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tune_step import SHAPES, check_kernel, machine, random_model

from otaro import sefp
from otaro.json_file import write_json
from otaro.ops import gpu
from otaro.precision import Precision
from otaro.sefp import Format

M8, M4, M3 = Precision.E5M8, Precision.E5M4, Precision.E5M3


def seconds(run: Callable[[], Any], times: int = 5) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(times):
        run()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3 / times


def check_tiers() -> int:
    """Bit equality with the torch codec; returns how many tensors were compared."""
    compared = 0
    generator = torch.Generator(device="cuda").manual_seed(0)
    for format in (Format(), Format(group_size=32), Format(group_size=256)):
        for shape in ((192, 640), (33, 100)):
            weight, narrow, wide = (torch.randn(shape, generator=generator, device="cuda") * 0.02 for _ in range(3))
            both = [(M3, narrow), (M4, wide)]
            for dtype in (torch.float32, torch.bfloat16):
                result = torch.empty_like(weight, dtype=dtype)
                batch = gpu.prepare([weight], [result], format.group_size, [(width, [tier]) for width, tier in both])
                for again, precision in product((False, True), Precision):
                    gpu.run(batch, precision, format, again=again)
                    expected = sefp.decode(sefp.encode_unchecked(weight, precision, format, both)).to(dtype)
                    if not torch.equal(result, expected):
                        raise SystemExit(f"the kernel differs from the codec: {format} {shape} {precision} {again}")
                    compared += 1
    return compared


def measure(shape: str, rounds: int) -> dict[str, Any]:
    format = Format()
    weights = [weight.detach() for weight in random_model(shape, "cuda").parameters() if weight.dim() == 2]
    results = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
    tiers = [(width, [weight + 0.01 * torch.randn_like(weight) for weight in weights]) for width in (M3, M4)]
    alone = gpu.prepare(weights, results, format.group_size)
    batch = gpu.prepare(weights, results, format.group_size, tiers)
    count = sum(weight.numel() for weight in weights)
    big = torch.empty(1 << 28, device="cuda")
    copied = torch.empty_like(big)
    kinds: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: copied.copy_(big), 8 * big.numel()),
        "alone": (lambda: gpu.run(alone, M8, format), 6 * count),
        "E5M8, found": (lambda: gpu.run(batch, M8, format), 14 * count),
        "E5M4, known": (lambda: gpu.run(batch, M4, format, again=True), 10 * count),
        "E5M3, known": (lambda: gpu.run(batch, M3, format, again=True), 6 * count),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name, (run, _) in kinds.items():
            found = seconds(run)
            if number:  # the first round compiles
                times[name].append(found)
    rates = {name: kinds[name][1] / statistics.median(found) for name, found in times.items()}
    return {
        "weights": count,
        "copy_bytes_per_second": rates["copy"],
        "kernels": {
            name: {"seconds": statistics.median(times[name]), "share_of_copy": rates[name] / rates["copy"]}
            for name in list(kinds)[1:]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--search", action="store_true", help="try sizes of blocks, print, write nothing")
    parser.add_argument("--json", help="write the result there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU")
    if arguments.search:
        for gpu.BLOCK_WEIGHTS in (512, 1024, 2048):
            for gpu.WARPS in (4, 8, 16):
                found = measure(arguments.shape, 3)["kernels"]
                print(
                    gpu.BLOCK_WEIGHTS,
                    gpu.WARPS,
                    {name: f"{1e3 * row['seconds']:.2f} ms" for name, row in found.items()},
                )
        return
    compared = check_kernel() + check_tiers()
    result = {"shape": arguments.shape, "machine": machine(), "compared": compared}
    result |= measure(arguments.shape, arguments.rounds)
    for name, row in result["kernels"].items():
        print(f"{name}: {1e3 * row['seconds']:.2f} ms, {row['share_of_copy']:.0%} of copying")
    if arguments.json:
        write_json(result, Path(arguments.json))


if __name__ == "__main__":
    main()
