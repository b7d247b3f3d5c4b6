"""Makes transformers read packed folders, without importing transformers.

transformers keeps its quantizers in a table in one module, and importing :mod:`otaro.hf` enters ours. If the table is
there already, that is done at once; if not, a finder waits for it: it lets the usual finders find the module, imports
ours as soon as the module has run, and is gone. A program that never imports transformers pays nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

QUANTIZER_TABLE = "transformers.quantizers.auto"


def register_with_transformers() -> None:
    """Enter our quantizer now if transformers' table is loaded, else as soon as it is; may be called again."""
    if QUANTIZER_TABLE in sys.modules:
        _register()
    elif not any(isinstance(finder, _TableFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TableFinder())


def _register() -> None:
    # Where it is being imported right now and brought the table in itself, it registers when it is done.
    importlib.import_module("otaro.hf")


class _TableFinder(MetaPathFinder):
    """Finds nothing itself: gives the table's spec a loader that registers us after the module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != QUANTIZER_TABLE:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


class _RegisteringLoader(Loader):
    """Runs a module with its own loader, hands it back that loader, then registers us."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register()
