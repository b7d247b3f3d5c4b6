"""The CUDA kernels on a CPU: their source compiled as C++, run with every access checked. See machine.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from otaro import ops
from otaro.ops import cuda
from otaro.ops.cuda import calls, step

FOLDER = Path(__file__).parent
SOURCE = FOLDER.parents[1] / "src" / "otaro" / "ops" / "cuda"
LIMITS = calls.Device(processors=3, shared=228 * 1024)
ITEM = {0: 2, 1: 2, 2: 4}


class EmulatedKernel:
    """Stands for a compiled kernel; `seed` decides in which order threads run and copies arrive."""

    seed = 0

    def __init__(self, library: ctypes.CDLL, name: str, extra: int, columns: int, head_extra: int = 0) -> None:
        self.library, self.name, self.extra, self.columns, self.head_extra = library, name, extra, columns, head_extra

    def active_clusters(self, split: int, threads: int, shared: int) -> int:
        return max(LIMITS.processors // split, 1)

    def launch(
        self,
        call: ctypes.Structure,
        blocks: int,
        threads: int,
        shared: int = 0,
        split: int = 1,
        overlap: bool = False,
        together: bool = False,
    ) -> None:
        assert shared <= LIMITS.shared - 1024
        library = self.library
        library.forget()
        if isinstance(call, step.CStep):
            assert together
            self.declare_step(call)
            arguments = (
                ctypes.byref(call),
                self.extra,
                self.head_extra,
                self.columns,
                blocks,
                threads,
                shared,
                self.seed,
            )
            if error := library.run_step(*arguments):
                raise AssertionError(error.decode())
            return
        self.declare_planes(call.planes, self.extra if isinstance(call, calls.CDecode) else call.stored - 3)
        if isinstance(call, calls.CDecode):
            size = call.count * call.planes.columns * ITEM[call.kind]
            declare(library, call.ids, call.count * 8)
            declare(library, call.values, size, written=True)
            error = library.run_decode(ctypes.byref(call), blocks, threads, self.seed)
        else:
            rows, columns = call.planes.rows, call.planes.columns
            for address, size in ((call.x, 2 * call.batch * columns), (call.bias, 2 * rows), (call.mantissa, 4)):
                declare(library, address, size)
            declare(library, call.y, 2 * call.batch * (call.gated or rows), written=True)
            arguments = (ctypes.byref(call), self.extra, self.columns, blocks, shared, self.seed)
            error = library.run_matvec(*arguments)
        if error:
            raise AssertionError(error.decode())

    def declare_step(self, call: step.CStep) -> None:
        """All that a step reads and writes; texts' keys and values are declared by whoever has them."""
        sizes, batch, floats = call.size, call.batch, 4
        table = (calls.CPlanes * (call.layers * step.MATRICES)).from_address(call.planes)
        for planes in (*table, call.head):
            self.declare_planes(planes, 0)
        for number, bias in enumerate(call.bias):
            declare(self.library, bias, 2 * call.layers * sizes[number].rows)
        heads = batch * call.heads
        read = {
            "norms": floats * 2 * call.layers * call.hidden,
            "final_norm": floats * call.hidden,
            "query_norms": floats * call.layers * call.dimension,
            "key_norms": floats * call.layers * call.dimension,
            "frequency": floats * call.dimension // 2,
            "windows": 4 * call.layers,
            **dict.fromkeys(("positions", "addresses", "room"), 8 * batch),
        }
        split = call.stretches if call.stretches > 1 else 0
        written = {
            "qkv": floats * batch * sizes[0].rows,
            "partial": floats * heads * split * call.dimension,
            "extremes": floats * heads * split * 2,
            "mixed": 2 * heads * call.dimension,
            "inner": 2 * batch * call.intermediate,
            "logits": 2 * batch * call.head.rows,
        }
        for name, size in read.items():
            declare(self.library, getattr(call, name), size)
        for name, size in written.items():
            declare(self.library, getattr(call, name), size, written=True)
        # These hold something before.
        self.library.declare(call.x, floats * batch * call.hidden, 1)
        self.library.declare(call.counters, 4 * step.counters(call.kv_heads), 1)
        addresses, room = ((ctypes.c_longlong * batch).from_address(at) for at in (call.addresses, call.room))
        for address, tokens in zip(addresses, room, strict=True):
            if address:
                self.library.declare(address, 2 * call.layers * 2 * call.kv_heads * tokens * call.dimension, 1)

    def declare_planes(self, planes: calls.CPlanes, extra: int) -> None:
        units = -(-planes.rows // 16) * planes.units
        declare(self.library, planes.base, 2048 * units)
        declare(self.library, planes.scale, 64 * units)
        for address in planes.bits:
            declare(self.library, address, 512 * units)


def declare(library: ctypes.CDLL, address: int | None, size: int, written: bool = False) -> None:
    """What a kernel may read or write; results are spoiled first."""
    if address is None:
        return
    if written:
        ctypes.memset(address, 0xFF, size)  # NaN in every type of values
    library.declare(address, size, int(written))


def build(folder: Path) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the emulation needs Linux and a C++ compiler")
    target = folder / "libemulation.so"
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", f"-I{SOURCE}", "-o", str(target)]
    subprocess.run([*command, str(FOLDER / "emulation.cpp")], check=True)
    library = ctypes.CDLL(str(target))
    for run in (library.run_matvec, library.run_decode, library.run_step):
        run.restype = ctypes.c_char_p
    library.declare.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.matvec_size.restype = library.decode_size.restype = library.step_size.restype = ctypes.c_size_t
    return library


def install(library: ctypes.CDLL, patch: pytest.MonkeyPatch) -> None:
    """Let tensors on the CPU be served by the emulated kernels."""

    def kernel(name: str, index: int, **definitions: int) -> EmulatedKernel:
        named = (definitions.get(f"OTARO_{part}", 0) for part in ("EXTRA", "COLUMNS", "HEAD_EXTRA"))
        return EmulatedKernel(library, name, *named)

    for cache in (cuda._launch_plan, cuda._has_plan, ops._arranges):
        cache.cache_clear()
    patch.setattr(cuda.compiler, "kernel", kernel)
    patch.setattr(cuda, "device_limits", lambda index: LIMITS)
    patch.setattr(cuda, "available", lambda device: None)
    patch.setattr(EmulatedKernel, "seed", 0)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of floating-point numbers, so that zeros with a sign and NaN are compared too."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
