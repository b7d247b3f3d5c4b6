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
from otaro.ops.cuda import calls

FOLDER = Path(__file__).parent
SOURCE = FOLDER.parents[1] / "src" / "otaro" / "ops" / "cuda"
LIMITS = calls.Device(processors=3, shared=228 * 1024)
ITEM = {0: 2, 1: 2, 2: 4}


class EmulatedKernel:
    """Stands for a compiled kernel; `seed` decides in which order threads run and copies arrive."""

    seed = 0

    def __init__(self, library: ctypes.CDLL, name: str, extra: int, columns: int) -> None:
        self.library, self.name, self.extra, self.columns = library, name, extra, columns

    def active_clusters(self, split: int, threads: int, shared: int) -> int:
        return max(LIMITS.processors // split, 1)

    def launch(
        self, call: ctypes.Structure, blocks: int, threads: int, shared: int = 0, split: int = 1, overlap: bool = False
    ) -> None:
        assert shared <= LIMITS.shared - 1024
        library = self.library
        library.forget()
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
    library.run_matvec.restype = library.run_decode.restype = ctypes.c_char_p
    library.declare.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.matvec_size.restype = library.decode_size.restype = ctypes.c_size_t
    return library


def install(library: ctypes.CDLL, patch: pytest.MonkeyPatch) -> None:
    """Let tensors on the CPU be served by the emulated kernels."""

    def kernel(name: str, index: int, **definitions: int) -> EmulatedKernel:
        return EmulatedKernel(library, name, definitions.get("OTARO_EXTRA", 0), definitions.get("OTARO_COLUMNS", 0))

    for cache in (cuda._launch_plan, cuda._has_plan, ops._arranges):
        cache.cache_clear()
    patch.setattr(cuda.compiler, "kernel", kernel)
    patch.setattr(cuda, "device_limits", lambda index: LIMITS)
    patch.setattr(cuda, "available", lambda device: None)
    patch.setattr(EmulatedKernel, "seed", 0)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of floating-point numbers, so that zeros with a sign and NaN are compared too."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
