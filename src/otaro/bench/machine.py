"""The machine that figures were taken on: what it is, and how fast its memory delivers."""

from __future__ import annotations

import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch

import otaro
from otaro.engine import native
from otaro.engine.engine import usable_cores
from otaro.ops import cpu

READ_BYTES = 1 << 28
"""Far more than caches hold."""
GPU_READ_BYTES = 1 << 31


class Bandwidth:
    """Measures how many bytes a second some threads read from memory."""

    def __init__(self, threads: int) -> None:
        self._data = numpy.ones(READ_BYTES // 8, dtype=numpy.uint64)
        self._threads = threads

    def measure(self) -> float:
        """The best of three times."""
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            native.read(self._data, self._threads)
            seconds.append(time.perf_counter() - start)
        return self._data.nbytes / min(seconds)


class GpuBandwidth:
    """Measures how many bytes a second a GPU reads from its memory."""

    def __init__(self, nbytes: int = GPU_READ_BYTES) -> None:
        self._data = torch.ones(nbytes // 4, dtype=torch.float32, device="cuda")

    def measure(self) -> float:
        """The best of five sums."""
        seconds = []
        self._data.sum()
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._data.sum()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        return self._data.nbytes / min(seconds)


def describe(threads: int, bandwidth: float, *, gpu: bool = False) -> dict[str, Any]:
    """What a reader must know to compare figures."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda} if gpu else {}
    return {
        **({"gpu": torch.cuda.get_device_name()} if gpu else {}),
        "processor": _processor(),
        "cores": usable_cores(),
        "instruction_set": cpu.isa(),
        "threads": threads,
        "read_bytes_per_second": bandwidth,
        "system": platform.platform(),
        "versions": {
            "otaro": otaro.__version__,
            "python": platform.python_version(),
            "numpy": numpy.__version__,
            **versions,
            "llama-cpp-python": _version("llama-cpp-python"),
        },
    }


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
