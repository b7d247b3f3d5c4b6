"""Compiling the kernels where they run, and launching them: NVRTC and the CUDA driver through ctypes.

Users of torch have NVRTC (it comes with torch) and the driver, but no nvcc and no headers; the source needs neither. A
compiled kernel is kept under the user's cache folder, by source, options, GPU and version of NVRTC, so that it is
compiled once on a machine. torch's own way to NVRTC is private, not in every torch that is supported, and knows no
clusters; the driver's launch is a stable interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from otaro.errors import OtaroError

CAPABILITY = (9, 0)
"""The first GPUs with copies of blocks of bytes and with clusters."""
CACHE_VARIABLE = "OTARO_CACHE"
HEADERS = ("machine.cuh", "planes.cuh")
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER, _OVERLAP = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, …_PROGRAMMATIC_STREAM_SERIALIZATION
_DEFAULT_SHARED = 48 * 1024


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def available(device: torch.device) -> str | None:
    """None where the kernels can run on a device, else the reason why not."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "not an NVIDIA GPU"
    return _available(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _available(index: int) -> str | None:
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < CAPABILITY:
        return f"compute capability {major}.{minor}, and the kernels need {CAPABILITY[0]}.{CAPABILITY[1]}"
    try:
        _nvrtc()
        _driver()
    except OSError as error:
        return str(error)
    return None


class Kernel:
    """A compiled kernel on one device."""

    def __init__(self, function: ctypes.c_void_p, index: int) -> None:
        self._function = function
        self._index = index
        self._shared = _DEFAULT_SHARED

    def active_clusters(self, split: int, threads: int, shared: int) -> int:
        """How many clusters of so many blocks can be at work at once."""
        self._allow(shared)
        attributes = (_Attribute * 1)(_Attribute(_CLUSTER, 0, _words(split, 1, 1)))
        config = _Config((split, 1, 1), (threads, 1, 1), shared, None, attributes, 1)
        count = ctypes.c_int()
        with _current(self._index):
            _check(_driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(config)))
        return count.value

    def launch(
        self, call: ctypes.Structure, blocks: int, threads: int, shared: int = 0, split: int = 1, overlap: bool = False
    ) -> None:
        """Put one launch on the current stream; with `overlap` it may begin before its predecessor has ended."""
        self._allow(shared)
        attributes = (_Attribute * 2)()
        count = 0
        if split > 1:
            attributes[count] = _Attribute(_CLUSTER, 0, _words(split, 1, 1))
            count += 1
        if overlap:
            attributes[count] = _Attribute(_OVERLAP, 0, _words(1))
            count += 1
        stream = torch.cuda.current_stream(self._index).cuda_stream
        config = _Config((blocks, 1, 1), (threads, 1, 1), shared, stream, attributes, count)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        with _current(self._index):
            _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, arguments, None))

    def _allow(self, shared: int) -> None:
        if shared > self._shared:
            with _current(self._index):
                _check(_driver().cuFuncSetAttribute(self._function, _MAX_SHARED, shared))
            self._shared = shared


def kernel(name: str, index: int, **definitions: int) -> Kernel:
    """The kernel of the file of that name, compiled with definitions for a device."""
    return _kernel(name, index, tuple(sorted(definitions.items())))


@functools.cache
def _kernel(name: str, index: int, definitions: tuple[tuple[str, int], ...]) -> Kernel:
    major, minor = torch.cuda.get_device_capability(index)
    cubin = compiled(name, f"sm_{major}{minor}", definitions)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with _current(index):
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin))
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, f"{name}_kernel".encode()))
    return Kernel(function, index)


@functools.cache
def source(name: str) -> str:
    """All that is compiled for a kernel."""
    return "\n".join((Path(__file__).parent / file).read_text("utf-8") for file in (*HEADERS, f"{name}.cu"))


def compiled(name: str, architecture: str, definitions: tuple[tuple[str, int], ...]) -> bytes:
    """The machine code of a kernel for an architecture such as sm_90, from the cache or made now."""
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in definitions),
    ]
    described = "\0".join((source(name), *options, f"{major.value}.{minor.value}"))
    path = cache_folder() / f"{hashlib.sha256(described.encode()).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    cubin = _compile(nvrtc, source(name), options)
    # A folder that cannot be written to costs time at the next start, nothing else.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(cubin)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return cubin


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``OTARO_CACHE``, or the user's own cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen) / "kernels"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "otaro" / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "otaro" / "kernels"


def _compile(nvrtc: ctypes.CDLL, text: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"otaro.cu", 0, None, None):
        raise OtaroError("NVRTC cannot be used: reinstall torch, or set OTARO_BACKEND=reference")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode()
            raise OtaroError(f"the CUDA kernels do not compile: set OTARO_BACKEND=reference ({log.strip()})")
        return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, get_size: Any, get: Any) -> bytes:
    size = ctypes.c_size_t()
    if get_size(program, ctypes.byref(size)):
        raise OtaroError("NVRTC gives no result: reinstall torch, or set OTARO_BACKEND=reference")
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    for path in _nvrtc_paths():
        with contextlib.suppress(OSError):
            # NVRTC opens a second library by its bare name: loaded already, it is found wherever it lies.
            if isinstance(path, Path):
                for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(path))
    raise OSError("NVRTC is missing, which comes with torch for NVIDIA GPUs: reinstall torch")


def _nvrtc_paths() -> Iterator[Path | str]:
    """Where NVRTC of torch's own CUDA version may be: in torch's packages, in a toolkit, known to the loader."""
    major = (torch.version.cuda or "13").split(".")[0]
    names = [f"nvrtc64_{major}0_0.dll"] if sys.platform == "win32" else [f"libnvrtc.so.{major}"]
    folders = [Path(torch.__file__).parent / "lib"]
    if (spec := find_spec("nvidia")) is not None:
        for root in spec.submodule_search_locations or ():
            folders += [Path(root) / f"cu{major}" / "lib", Path(root) / "cuda_nvrtc" / "lib"]
            folders += [Path(root) / f"cu{major}" / "bin", Path(root) / "cuda_nvrtc" / "bin"]
    if toolkit := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        folders += [Path(toolkit) / "lib64", Path(toolkit) / "bin"]
    folders.append(Path("/usr/local/cuda/lib64"))
    yield from (folder / name for folder in folders for name in names if (folder / name).is_file())
    yield from names


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class _Entered(threading.local):
    """The devices whose context this thread has."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_entered = _Entered()


@contextlib.contextmanager
def _current(index: int) -> Iterator[None]:
    """A device and its context, the one that torch uses, current in this thread."""
    with torch.cuda.device(index):
        if index not in _entered.devices:
            context = ctypes.c_void_p()
            _check(_driver().cuCtxGetCurrent(ctypes.byref(context)))
            if not context:  # a thread in which torch has not touched the device yet
                _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), index))
                _check(_driver().cuCtxSetCurrent(context))
            _entered.devices.add(index)
        yield


def _words(*values: int) -> Any:
    return (ctypes.c_uint * 16)(*values)


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()}")
