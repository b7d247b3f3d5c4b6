"""The Triton kernels of the engine against plain torch, in Triton's interpreter; and, compiled, that they compile.

The interpreter does not round to bfloat16 as hardware does, and cannot multiply it (codes are multiplied as float16).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from otaro.engine.cuda import fused, picking, plain
from otaro.engine.cuda.matrices import DenseMatrix
from otaro.engine.cuda.model import DeviceModel, Layer
from otaro.engine.cuda.rows import DeviceSession, Rows
from otaro.engine.shape import Shape
from otaro.precision import Precision

BUDGET = {torch.float16: 2e-3, torch.bfloat16: 4e-2}


def close(found, wanted):
    assert float((found.float() - wanted.float()).abs().max()) <= BUDGET[found.dtype] * float(wanted.abs().max())


for dtype in BUDGET:
    x, delta, weight = torch.randn(3, 48), torch.randn(3, 48).to(dtype), torch.rand(48)
    for added in (delta, None):
        streams = [x.clone(), x.clone()]
        norms = [kind.norm(x, added, weight, 1e-5, dtype) for kind, x in zip((fused, plain), streams)]
        assert torch.equal(*streams)
        close(*norms)
    both = torch.randn(3, 160).to(dtype)
    for up in (80, 8):
        close(*(kind.swiglu(both, 70, up) for kind in (fused, plain)))
logits = torch.randn(4, 5000).half()
logits[0, 4100] = logits[0, 100] = 50
logits[1, 4999] = 9
logits[2, 30], logits[3, 4000] = torch.nan, torch.inf
assert fused.likeliest(logits).tolist() == [100, 4999, -1, -1] == picking.greedy(logits).tolist()


def compare(heads, kv_heads, dimension, cache, window, normed, stretches, positions, dtype=torch.float16, larger=1):
    frequency = tuple(10000 ** (-2 * i / dimension) for i in range(dimension // 2))
    shape = Shape(2, 48, 80, heads, kv_heads, dimension, 99, 1e-5, frequency, 1.0, (window, window))
    key = -(-heads * dimension // 16) * 16
    value = key + -(-kv_heads * dimension // 16) * 16
    columns = 2 * value - key
    norms = (torch.rand(dimension) + 0.5, torch.rand(dimension) + 0.5) if normed else (None, None)
    layer = Layer(DenseMatrix(torch.zeros(columns, 48), (0, key, value)), None, None, None, None, *norms, window)
    model = DeviceModel(shape, [layer, layer], None, None, torch.zeros(48), dtype, {})
    qkv = torch.randn(len(positions), columns).to(dtype)
    qkv[:, : heads * dimension] *= larger
    outcomes = []
    for kind in (fused, plain):
        sessions = []
        for position in positions:
            session = DeviceSession(model, 700, cache=cache)
            session.reserve(max(position, 0) + 1)
            generator = torch.Generator().manual_seed(position + 1)
            held = torch.randn(2, 2, kv_heads, session.capacity, dimension, generator=generator)
            for part, own in zip(session.parts, plain.encode(held if cache else held.to(dtype), session.layout)):
                part[:] = own
                part[:, :, :, position + 1 :] = 255 if cache else torch.nan  # memory that is not in use
            sessions.append(session)
        places = torch.tensor([[one.cache.data_ptr() for one in sessions], [one.capacity for one in sessions]])
        tokens = torch.zeros(len(positions), dtype=torch.int64)
        rows = Rows(tokens, torch.tensor(positions), places, sessions, sessions[0].layout, stretches)
        query = kind.rotate(model, layer, 1, qkv, rows)
        mixed = kind.attend(model, layer, 1, query, rows)
        if len(positions) == 1 and kind is fused:  # in as few launches as can be: to the bit the same
            assert torch.equal(fused.mix(model, layer, 1, qkv, rows), mixed)
        outcomes.append((query, mixed, sessions))
    (query, mixed, sessions), (wanted_query, wanted, others) = outcomes
    there = [row for row, position in enumerate(positions) if position >= 0]
    close(query[there], wanted_query[there])
    close(mixed[there], wanted[there])
    if positions == [0]:  # the value itself
        assert torch.equal(mixed, wanted)
    for session, other in zip(sessions, others):
        assert torch.equal(session.cache.nan_to_num(), other.cache.nan_to_num())
    return mixed


fused.MIXED_STRETCHES = 1
torch.manual_seed(0)
compare(4, 2, 12, None, 0, False, 1, [5, -1, 90])
compare(4, 2, 12, None, 0, True, 4, [5, -1, 300, 127, 128])
compare(6, 2, 64, None, 50, False, 4, [5, 0, 300, 170])
compare(2, 2, 16, None, 300, False, 16, [699, 20])
compare(4, 1, 128, Precision.E5M4, 0, False, 4, [5, -1, 300])
compare(4, 2, 12, Precision.E5M8, 9, True, 1, [5, 100])
compare(4, 2, 80, Precision.E5M6, 0, False, 1, [5, 100])
compare(4, 2, 64, Precision.E5M3, 0, False, 1, [100])
for mantissa in range(3, 9):
    width = Precision.from_mantissa(mantissa)
    compare(4, 1, 128, width, 40, False, 4, [150, 300])
    compare(4, 2, 96, width, 0, False, 1, [70])
    compare(4, 2, 80, width, 0, False, 1, [0])
    compare(4, 2, 64, width, 0, False, 4, [130], torch.bfloat16)
compare(2, 1, 256, Precision.E5M8, 0, False, 1, [40])
compare(2, 1, 64, Precision.E5M4, 0, False, 1, [40], torch.bfloat16, 1e5)  # no float16
compare(4, 2, 12, None, 0, False, 1, [0])
compare(4, 2, 80, None, 0, False, 4, [300])
compare(6, 2, 64, None, 50, False, 4, [140])

# A text is the same to the bit whatever the longest of a batch has room for.
results = []
for stretches in (1, 4, 16):
    torch.manual_seed(1)
    results.append([compare(4, 2, 16, cache, 0, False, stretches, [77]) for cache in (None, Precision.E5M5)])
for one in results[1:]:
    assert all(torch.equal(*pair) for pair in zip(results[0], one))

# A model through the kernels, and in plain torch.
import os
import numpy
from experiments.table2 import models
from otaro.engine.cuda.work import DeviceWork

cpu = torch.device("cpu")
model = models.packed_model("tiny", torch.float16, cpu)
widths, logits = models.widths_of(model, Precision.E5M4), []
for interpreted in ("1", "0"):
    os.environ["TRITON_INTERPRET"] = interpreted
    work, session = DeviceWork(model), DeviceSession(model, 60, cache=Precision.E5M8)
    parts = [work.logits(session, list(range(20)), 0, widths), work.logits(session, [7, 8, 9], 20, widths, rows=3)]
    logits.append(torch.from_numpy(numpy.concatenate(parts)).half())
close(*logits)
print("alike")
"""

COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from otaro.engine.cuda import kernels

POINTERS = {"positions": "*i64", "places": "*i64", "x": "*fp32", "weight": "*fp32", "frequency": "*fp32"}
POINTERS |= dict.fromkeys(("query_norm", "key_norm", "partial", "extremes"), "*fp32")
POINTERS |= dict.fromkeys(("delta", "out", "qkv", "query"), "*bf16")
POINTERS |= {"logits": "*fp16", "largest": "*fp32", "token": "*i64"}
NUMBERS = {"ROWS": "i32", "layer": "i32", "epsilon": "fp32", "rope_factor": "fp32", "scale": "fp32"}
CACHE = {"MANTISSA": 0, "PADDED": 64, "ROW": 64, "SCALES": 0}
CODES = {"MANTISSA": 5, "PADDED": 64, "ROW": 48, "SCALES": 1}
MIDDLE = {"MANTISSA": 4, "PADDED": 128, "ROW": 80, "SCALES": 2}
LARGE = {"MANTISSA": 8, "PADDED": 256, "ROW": 288, "SCALES": 4}
HEADS = {"KV_HEADS": 3, "DIM": 64, "BLOCK": 64}
ATTEND = {**HEADS, "GROUP": 3, "GROUP_BLOCK": 16, "KEYS": 128, "WINDOW": 4096}
ROTATE = {**HEADS, "STRIDE": 960, "KEY": 576, "VALUE": 768, "HEADS": 9, "CANDIDATES": 6, "ERROR_MANTISSA": 5}


def build(kernel, warps, **constants):
    names = kernel.arg_names
    constants["OVERLAP"] = True
    kinds = {**POINTERS, **({"places": "*i32"} if "largest" in names else {})}
    signature = {name: kinds.get(name) or NUMBERS.get(name) or "constexpr" for name in names}
    given = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in POINTERS}
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=aligned)
    options = {"num_warps": warps, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["ptx"].count("griddepcontrol") == 2, kernel
    return made.asm["ptx"]


build(kernels.norm_kernel, 2, HIDDEN=576, BLOCK=1024, ADD=True)
build(kernels.swiglu_kernel, 4, COLUMNS=1536, STRIDE=3072, UP=8, TURN=8, BLOCK=1024)
build(kernels.rotate_kernel, 1, NORMED=True, **ROTATE, **CACHE)
build(kernels.rotate_kernel, 1, NORMED=False, **ROTATE, **CODES)
build(kernels.rotate_kernel, 2, NORMED=False, **{**ROTATE, "DIM": 128, "BLOCK": 128}, **MIDDLE)
build(kernels.attend_kernel, 4, STRETCHES=1, TILE=128, **ATTEND, **CACHE)
build(kernels.attend_kernel, 8, STRETCHES=16, TILE=128, **ATTEND, **CODES)
build(kernels.attend_kernel, 8, STRETCHES=16, TILE=32, **{**ATTEND, "DIM": 256, "BLOCK": 256}, **LARGE)
program = build(kernels.attend_kernel, 8, STRETCHES=16, TILE=128, **{**ATTEND, "DIM": 128, "BLOCK": 128}, **MIDDLE)
loads = [line for line in program.splitlines() if "ld.global" in line]
assert len(loads) < 30, loads  # each byte of 256 rows once, by vectors; a load for each number would be hundreds
MIX = {**ATTEND, "KEY": 576, "VALUE": 768}
build(kernels.mix_kernel, 4, STRETCHES=1, **MIX)
build(kernels.mix_kernel, 4, STRETCHES=16, **MIX)
build(kernels.combine_kernel, 2, HEADS=9, DIM=64, BLOCK=64, KEYS=128, WINDOW=0, STRETCHES=16)
build(kernels.largest_kernel, 4, VOCABULARY=49152, PARTS=24, BLOCK=2048)
build(kernels.likeliest_kernel, 1, NONE=-1, PARTS=24, BLOCK=32)
print("compiled")
"""


def run(program: str, **environment: str) -> str:
    triton = pytest.importorskip("triton")
    assert triton is not None
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_agree_with_plain_torch() -> None:
    assert run(PROGRAM, TRITON_INTERPRET="1") == "alike"


def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # Triton reads the source of what it compiles from files
    program.write_text(COMPILED, "utf-8")
    assert run(f"import runpy; runpy.run_path({str(program)!r})", TRITON_CACHE_DIR=str(tmp_path)) == "compiled"
