"""One language model, stored once in SEFP, run at every precision from E5M8 to E5M3.

    otaro.pack("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-packed")
    model = otaro.load("smollm2-packed", "E5M8")
    model.set_precision("E5M3")

The names below are imported when they are first used. After ``import otaro``, `AutoModelForCausalLM.from_pretrained`
reads packed folders too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otaro._lazy import lazy
from otaro._register import register_with_transformers

if TYPE_CHECKING:
    from otaro import export, tune
    from otaro._version import __version__
    from otaro.checkpoint import cut, inspect, pack, verify
    from otaro.engine.engine import Engine
    from otaro.hf import load
    from otaro.ops import quantize
    from otaro.precision import Precision
    from otaro.sefp import Format, decode, encode, truncate

__all__ = [
    "Engine",
    "Format",
    "Precision",
    "__version__",
    "cut",
    "decode",
    "encode",
    "export",
    "inspect",
    "load",
    "pack",
    "quantize",
    "truncate",
    "tune",
    "verify",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Engine": "otaro.engine.engine",
        "Precision": "otaro.precision",
        "__version__": "otaro._version",
        "export": "otaro.export",
        "load": "otaro.hf",
        "quantize": "otaro.ops",
        "tune": "otaro.tune",
        **dict.fromkeys(("cut", "inspect", "pack", "verify"), "otaro.checkpoint"),
        **dict.fromkeys(("Format", "decode", "encode", "truncate"), "otaro.sefp"),
    },
)

register_with_transformers()
