"""Writing packed models in other programs' formats, value for value."""

from otaro.export.gguf import export_gguf

__all__ = ["export_gguf"]
