"""What this machine offers, and which backend runs each operation: the text of ``python -m otaro``.

It answers two questions: "why is it slow here?" and "what shall I write in a bug report?".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from otaro.console import facts_table, plain_table
from otaro.errors import OtaroError

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "gguf", "numpy")
# What /proc/cpuinfo calls the features the native core has versions for.
CPU_FLAGS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX-512F",
    "avx512bw": "AVX-512BW",
    "avx512_vnni": "AVX-512VNNI",
    "avx512vbmi": "AVX-512VBMI",
    "asimd": "NEON",
    "asimddp": "NEON dot product",
    "sve": "SVE",
}


@dataclass(frozen=True)
class Backend:
    """The backend that runs an operation, and the reason it was chosen."""

    op: str
    backend: str
    why: str


@dataclass(frozen=True)
class Diagnostics:
    """All that ``python -m otaro`` prints, as plain values."""

    versions: dict[str, str]
    platform: str
    cpu: str
    cpu_features: list[str]
    threads: int
    memory_bytes: int
    gpus: list[str]
    native_core: str
    backends: list[Backend]


def collect() -> Diagnostics:
    """Look at this machine; a part that is missing is described, never an error."""
    import torch

    cpu, features = _cpu()
    native_core, backends = _backends()
    return Diagnostics(
        versions={
            "otaro": _version("otaro-llm"),
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        platform=platform.platform(),
        cpu=cpu,
        cpu_features=features,
        threads=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=_gpus(),
        native_core=native_core,
        backends=backends,
    )


def show(diagnostics: Diagnostics, console: Console) -> None:
    """Print for a person."""
    facts = facts_table()
    for name, text in diagnostics.versions.items():
        facts.add_row(name, escape(text))
    facts.add_row("platform", escape(diagnostics.platform))
    facts.add_row("CPU", escape(diagnostics.cpu))
    facts.add_row("CPU features", ", ".join(diagnostics.cpu_features) or "none that are used")
    facts.add_row("threads", str(diagnostics.threads))
    facts.add_row("memory", f"{diagnostics.memory_bytes / 2**30:.1f} GiB")
    facts.add_row("GPU", escape("; ".join(diagnostics.gpus)) or "none")
    facts.add_row("native core", escape(diagnostics.native_core))
    console.print(facts)
    console.print()
    table = plain_table()
    for heading in ("op", "backend", "why"):
        table.add_column(heading, overflow="fold")
    for row in diagnostics.backends:
        table.add_row(escape(row.op), escape(row.backend), escape(row.why))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``python -m otaro``; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m otaro", description="What this machine offers, and which backend runs each operation."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    try:
        diagnostics = collect()
    except OtaroError as error:
        print(f"otaro: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(diagnostics), indent=2))
    else:
        show(diagnostics, Console())
    return 0


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> tuple[str, list[str]]:
    """The CPU's name and those of its features that matter here."""
    if not Path("/proc/cpuinfo").exists():
        features = ["NEON"] if platform.machine() in ("arm64", "aarch64") else []
        return platform.processor() or platform.machine(), features
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags", fields.get("features", "")).split()
    return fields.get("model name", platform.machine()), [name for flag, name in CPU_FLAGS.items() if flag in flags]


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{device.name}, {device.total_memory / 2**30:.1f} GiB" for device in devices]


def _backends() -> tuple[str, list[Backend]]:
    """The state of the native core, and the backend of each op."""
    import warnings

    from otaro import ops
    from otaro.ops import cpu

    reason = cpu.available()
    native_core = f"loaded, {cpu.isa()}" if reason is None else f"not loaded: {reason}"
    with warnings.catch_warnings():
        # The warning about plain torch says what the table is about to say.
        warnings.simplefilter("ignore")
        return native_core, [Backend(*row) for row in ops.backends()]
