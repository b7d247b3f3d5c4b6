"""One language model, stored once in SEFP, run at every precision from E5M8 to E5M3.

    otaro.pack("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-packed")
    model = otaro.load("smollm2-packed", "E5M8")
    model.set_precision("E5M3")

The names below are imported when they are first used: torch and transformers take seconds, and most of what a command
line does needs neither. After ``import otaro``, `AutoModelForCausalLM.from_pretrained` reads packed folders too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from otaro._register import register_with_transformers

if TYPE_CHECKING:
    from otaro.checkpoint import cut, inspect, pack, verify
    from otaro.engine.engine import Engine
    from otaro.hf import load
    from otaro.ops import quantize
    from otaro.precision import Precision
    from otaro.sefp import Format, decode, encode, truncate

    __version__: str

_HOMES = {
    "Engine": "otaro.engine.engine",
    "Format": "otaro.sefp",
    "Precision": "otaro.precision",
    "cut": "otaro.checkpoint",
    "decode": "otaro.sefp",
    "encode": "otaro.sefp",
    "inspect": "otaro.checkpoint",
    "load": "otaro.hf",
    "pack": "otaro.checkpoint",
    "quantize": "otaro.ops",
    "truncate": "otaro.sefp",
    "verify": "otaro.checkpoint",
}

__all__ = [
    "Engine",
    "Format",
    "Precision",
    "__version__",
    "cut",
    "decode",
    "encode",
    "inspect",
    "load",
    "pack",
    "quantize",
    "truncate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'otaro' has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("otaro-llm")
    except PackageNotFoundError:
        return "0+source"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_transformers()
