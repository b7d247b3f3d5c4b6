"""Names of a package that are imported when they are first used: torch and transformers take seconds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package; `homes` says in which module a name lives, or that it is one."""
    namespace = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        namespace[name] = home if homes[name] == f"{package}.{name}" else getattr(home, name)
        return namespace[name]

    return find, lambda: sorted({*namespace, *homes})
