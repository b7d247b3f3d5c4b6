"""The Triton kernel against the torch codec, bit for bit, in Triton's interpreter: no GPU is needed.

The interpreter flushes bfloat16's subnormals and does not round to it as hardware does, so that type is compared on a
real GPU only, by bench/gpu_quantize.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
from hard_weights import FORMATS, bits, hard_weight
from otaro import sefp
from otaro.ops import gpu
from otaro.precision import Precision

compared = 0
for format in FORMATS:
    for dtype in (torch.float32, torch.float16):
        weights = [hard_weight(columns, dtype) for columns in (5, 70)]
        results = [torch.full_like(weight, float("nan")) for weight in weights]
        batch = gpu.prepare(weights, results, format.group_size)
        for precision in (Precision.E5M8, Precision.E5M6, Precision.E5M3):
            gpu.run(batch, precision, format)
            for weight, result in zip(weights, results):
                expected = sefp.decode(sefp.encode(weight, precision, format), dtype)
                assert torch.equal(bits(result), bits(expected)), (format, dtype, precision)
                compared += 1
weight = hard_weight(130, torch.float32).reshape(4, 5, 130)
narrow = torch.empty_like(weight, dtype=torch.float16)
gpu.run(gpu.prepare([weight], [narrow], 64), Precision.E5M4, sefp.Format())
assert torch.equal(narrow, sefp.decode(sefp.encode(weight, Precision.E5M4), torch.float16))
for format in FORMATS:
    if format.scheme == "nested":
        weight = hard_weight(70, torch.float32)
        generator = torch.Generator().manual_seed(1)
        scale = weight.abs().amax(-1, keepdim=True).clamp(max=1e30)
        narrow, wide = (weight + 0.2 * scale * torch.randn(weight.shape, generator=generator) for _ in range(2))
        both = [(Precision.E5M3, narrow), (Precision.E5M4, wide)]
        for tiers, precisions in ((both, (3, 4, 5, 8)), (both[1:], (4, 8))):
            for precision in map(Precision.from_mantissa, precisions):
                result = gpu.quantize(weight, precision, format, tiers)
                expected = sefp.decode(sefp.encode_unchecked(weight, precision, format, tiers))
                assert torch.equal(bits(result), bits(expected)), (format, precision)
                compared += 1
        second = torch.empty_like(weight)
        tiers = [(width, [tier, tier.flip(0)]) for width, tier in both]
        batch = gpu.prepare([weight, weight.flip(0)], [result, second], format.group_size, tiers)
        gpu.run(batch, Precision.E5M8, format)
        for precision in (Precision.E5M3, Precision.E5M4, Precision.E5M8):
            result.fill_(float("nan"))
            second.fill_(float("nan"))
            gpu.run(batch, precision, format, again=True)
            expected = sefp.decode(sefp.encode_unchecked(weight, precision, format, both))
            for found in (result, second.flip(0)):
                assert torch.equal(bits(found), bits(expected)), (format, precision)
                compared += 1
nearest = sefp.Format("nearest")
weight = hard_weight(70, torch.float32)
result = torch.empty_like(weight)
batch = gpu.prepare([weight], [result], 64)
for precision in Precision:
    gpu.run(batch, precision, nearest, sliced=True)
    expected = sefp.decode(sefp.truncate(sefp.encode(weight, Precision.E5M8, nearest), precision))
    assert torch.equal(bits(result), bits(expected)), precision
    compared += 1
print(compared)
"""


def test_every_format_in_the_interpreter() -> None:
    """A process of its own: the interpreter is chosen when Triton is imported."""
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(places)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == 28 * 2 * 3 * 2 + 20 * (6 + 6) + 6
