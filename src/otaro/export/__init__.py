"""Writing packed models in other programs' formats, value for value."""

from typing import TYPE_CHECKING

from otaro._lazy import lazy

if TYPE_CHECKING:
    from otaro.export.gguf import export_gguf

__all__ = ["export_gguf"]

__getattr__, __dir__ = lazy(__name__, {"export_gguf": "otaro.export.gguf"})
