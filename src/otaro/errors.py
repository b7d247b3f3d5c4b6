"""What can go wrong because of the input, each said in one sentence.

The command line turns every :class:`OtaroError` into that sentence and exit code 2.
"""

LONGEST = 1000


class Sentence(Exception):  # noqa: N818
    """An error that is shown as one line, whatever a broken file put into its message."""

    def __str__(self) -> str:
        shown = (" " if letter.isspace() else letter for letter in super().__str__())
        text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown)
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 4 :]}"


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
