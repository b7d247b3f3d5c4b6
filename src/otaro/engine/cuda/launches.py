"""What a device can launch."""

from __future__ import annotations

import functools
import os

import torch

from otaro.errors import OtaroError
from otaro.ops.cuda import compiler

CUDA, PLAIN = "cuda", "plain"
"""Devices by name; the second is the code of the first in plain torch on a CPU, for tests."""
OVERLAP_VARIABLE, GRAPHS_VARIABLE = "OTARO_OVERLAP", "OTARO_GRAPHS"


def has_kernels(device: torch.device) -> bool:
    """Whether products are kernels of `otaro.ops.cuda`, or plain torch."""
    return compiler.available(device) is None


def uses_triton(device: torch.device) -> bool:
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether launches may begin before their predecessors have ended (``OTARO_OVERLAP=0``: never)."""
    if device.type != "cuda" or os.environ.get(OVERLAP_VARIABLE) == "0":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def captures(device: torch.device) -> bool:
    """Whether launches are captured as graphs (``OTARO_GRAPHS=0``: never)."""
    return device.type == "cuda" and os.environ.get(GRAPHS_VARIABLE) != "0"


def unusable() -> str | None:
    """Why no GPU of this machine can run the engine; None if one can."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU here"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is missing, which comes with torch for NVIDIA GPUs: reinstall torch"
    return compiler.available(torch.device("cuda", torch.cuda.current_device()))


def check_name(device: str) -> None:
    if device not in ("auto", "cpu", CUDA, PLAIN):
        raise OtaroError(f"there is no device '{device}': choose auto, cpu or cuda")


def choose(device: str, *, engine: bool = True) -> str:
    """The device that a name such as "auto" stands for; asked for a GPU where there is none, it is an error.

    Without the `engine` any GPU will do that torch has.
    """
    check_name(device)
    if device in ("cpu", PLAIN):
        return device
    reason = unusable() if engine or not torch.cuda.is_available() else None
    if device == CUDA and reason is not None:
        raise OtaroError(f"the model cannot run on a GPU: {reason}; choose the device cpu")
    return CUDA if reason is None else "cpu"


def describe(device: str) -> str:
    """A device for a person."""
    return str(torch.cuda.get_device_name()) if device == CUDA else "the CPU"


def torch_device(name: str) -> torch.device:
    if name == PLAIN:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
