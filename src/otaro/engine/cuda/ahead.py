"""One step ahead: a device begins with the next tokens while Python still hands out the last ones.

A step that follows its predecessor, each text's next token behind the one just picked, has nothing to wait for: token
and position are on the device. So it is launched at once, and if it is what is asked for next, its tokens are there
sooner. If not, it was for nothing; what it wrote lies behind the end of texts, where it is written again before it is
read. After that it takes more steps in a row before another is launched ahead.
"""

from __future__ import annotations

from typing import Any

import numpy
from numpy.typing import NDArray

MOST_PATIENCE = 64


class Ahead:
    """Whether a step is the one that was expected, and whether to launch the next one before it is asked for."""

    def __init__(self) -> None:
        self._texts: Any = None
        self._expected: NDArray[numpy.int64] | None = None
        self._launched = False
        self._row, self._patience = 0, 1

    def launched(self, texts: Any, fields: NDArray[numpy.int64]) -> bool:
        """Whether a step is under way already; called once for each.

        `texts` says which texts it is of, as they are: copied into or moved they are others.
        """
        expected, launched = self._expected, self._launched
        self._expected, self._launched = None, False
        follows = expected is not None and texts == self._texts and numpy.array_equal(fields, expected)
        self._row = self._row + 1 if follows else 0
        if launched:
            self._patience = 1 if follows else min(4 * self._patience, MOST_PATIENCE)
        return launched and follows

    @property
    def worth(self) -> bool:
        """Whether the step after this one shall be launched."""
        return self._row >= self._patience

    def expect(self, texts: Any, fields: NDArray[numpy.int64], launched: bool) -> None:
        """Say what the next step would be, and whether it was launched."""
        self._texts, self._expected, self._launched = texts, fields, launched

    def forget(self) -> None:
        """Something else is run: whatever was launched was for nothing."""
        if self._launched:
            self._patience = min(4 * self._patience, MOST_PATIENCE)
        self._expected, self._launched, self._row = None, False, 0
