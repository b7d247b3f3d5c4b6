"""A full disk, told in one sentence whichever library met it: each has an error of its own for it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from otaro.errors import OtaroError

# safetensors and tokenizers end their messages so.
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
# What torch.save says when not all could be written; it does not know why.
TORCH_ERRORS = ("inline_container.cc", "iostream error")


@contextmanager
def writing(path: Path, then: Callable[[], str]) -> Iterator[None]:
    """Say that `path` could not be written, why, and what to do then."""
    try:
        yield
    except Exception as error:
        reason = why_not_written(error)
        if reason is None:
            raise
        raise OtaroError(f"{path} could not be written: {reason}: {then()}") from error


def why_not_written(error: Exception) -> str | None:
    """What the system said when something was written; None where an error is about something else."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = SYSTEM_ERROR.search(str(error))
    if found is not None:
        return os.strerror(int(found[1]))
    if isinstance(error, RuntimeError) and any(text in str(error) for text in TORCH_ERRORS):
        return "the disk may be full"
    return None
