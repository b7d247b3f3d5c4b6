"""What can go wrong because of the input, each said in one sentence.

The command line turns every :class:`OtaroError` into that sentence and exit code 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

LONGEST = 1000


def printable(text: str) -> str:
    """A text from a file in one line that does nothing to a terminal, at most LONGEST characters of it."""
    shown = (" " if letter.isspace() else letter for letter in _shortened(text))
    return _shortened("".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown))


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 4 :]}"


def first_line(error: BaseException) -> str:
    """A foreign error's message, cut to what fits into a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


class Sentence(Exception):  # noqa: N818
    """An error that is shown as one line, whatever a broken file put into its message."""

    def __str__(self) -> str:
        return printable(super().__str__())


class OtaroError(Sentence):
    """The input cannot be used; the message says what, where and what to do."""


class PrecisionError(OtaroError, ValueError):
    """A precision that does not exist or that is not at hand."""


class WeightError(OtaroError, ValueError):
    """A weight that no number format can hold (NaN, infinity) or of an unsupported type."""


class FormatError(OtaroError, ValueError):
    """A packed folder, or a setting of the format, that cannot be used."""


class SourceError(OtaroError, ValueError):
    """A model to be packed that is missing, incomplete or of an unsupported kind."""


@contextlib.contextmanager
def foreign_code(said: str, kind: type[OtaroError] = OtaroError) -> Iterator[None]:
    """Around code of others that meets a file's content: whatever it raises becomes the sentence `said`, with a reason.

    Rust code that panics raises something that is no Exception.
    """
    try:
        yield
    except (Sentence, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{said}: {first_line(error)}") from error
