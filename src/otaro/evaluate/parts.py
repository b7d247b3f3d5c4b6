"""What is measured already, in a file beside the result: a line for each part, so that a stopped run can go on.

A part is known by everything that decides its value, the model's weights included. So the same command goes on where it
stopped, one that asks for more measures only that, and another model or another limit never meets the wrong numbers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError


class Parts:
    """Parts in a JSONL file, or in memory alone without one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        self.reused = 0
        if path is None or not path.exists():
            return
        content = path.read_bytes()
        # A run that was killed may have left half a line; whole ones end in a newline.
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                part = json.loads(line)
                self._values[part["key"]] = part["value"]
            except (ValueError, KeyError, TypeError) as error:
                raise OtaroError(f"{path}, line {number} is not a part of a result: delete or move the file") from error
        if len(whole) < len(content):
            path.write_bytes(whole)

    def get(self, **key: Any) -> Any:
        """The value of a part, or None."""
        value = self._values.get(_digest(key))
        self.reused += value is not None
        return value

    def add(self, value: Any, **key: Any) -> None:
        """Keep a part from now on."""
        digest = _digest(key)
        self._values[digest] = value
        if self._path is not None:
            described = {name: part for name, part in key.items() if len(str(part)) < 64}
            line = json.dumps({"key": digest, "about": described, "value": value}) + "\n"
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
