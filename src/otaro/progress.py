"""How far a long piece of work has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is."""
