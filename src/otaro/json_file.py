"""One JSON file: read wherever it may come from, written so that it is never half there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from otaro.partial import write_atomically

LARGEST = 1_000_000
"""Bytes of settings; a config has a few thousand."""
LARGEST_INDEX = 16_000_000
"""Bytes of an index of weight files; that of a model with 90,000 tensors has nine million."""


def read_json(path: Path, largest: int = LARGEST) -> Any:
    """The file's content; OSError or ValueError, with the reason, where there is none that can be used."""
    if not path.is_file():  # a pipe would keep its reader waiting
        raise FileNotFoundError(2, "there is no such file", str(path))
    if path.stat().st_size > largest:
        raise ValueError(f"it has more than {largest} bytes")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    write_atomically(path, lambda part: part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))
