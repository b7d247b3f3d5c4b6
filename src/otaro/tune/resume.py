"""Going on from a checkpoint: which one is whole, whether it belongs to this run, what a full disk leaves to do.

The Trainer writes a checkpoint's trainer_state.json last, so a folder where that file can be read is complete; one that
was being written when the process was killed is not, and is passed over.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError

CHECKPOINT = re.compile(r"checkpoint-\d+")
STATE = "trainer_state.json"
# A full disk has an error of its own in each library. safetensors and tokenizers end their messages so.
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
# What torch.save says when not all could be written; it does not know why.
TORCH_ERRORS = ("inline_container.cc", "iostream error")


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoint folders of a run by their step, complete or not."""
    found = (path for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name) and path.is_dir())
    return {int(path.name.removeprefix("checkpoint-")): path for path in found}


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    """The content of trainer_state.json; None where the checkpoint is not complete."""
    try:
        content = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "global_step" in content else None


def last_complete(folder: Path) -> Path | None:
    """The latest checkpoint that can be resumed from."""
    latest_first = (path for _, path in sorted(checkpoints(folder).items(), reverse=True))
    return next((path for path in latest_first if read_state(path) is not None), None)


@contextmanager
def writing(path: Path, run: Path) -> Iterator[None]:
    """Say that `path` could not be written, why, and how the run in that folder then goes on."""
    try:
        yield
    except Exception as error:
        reason = why_not_written(error)
        if reason is None:
            raise
        found = last_complete(run)
        start = "start again" if found is None else f"resume the run, which goes on from {found.name}"
        raise OtaroError(f"{path} could not be written: {reason}: free some space, then {start}") from error


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


def drop_later(folder: Path, start: int) -> None:
    """Delete checkpoints beyond the step resumed from: the run will come by theirs again."""
    for step, path in checkpoints(folder).items():
        if step > start:
            shutil.rmtree(path)


def check_settings(checkpoint: Path, settings: dict[str, Any]) -> int:
    """Refuse a checkpoint of another model, method or recipe; the updates done in one that is accepted."""
    state = read_state(checkpoint)
    if state is None:
        raise OtaroError(f"{checkpoint} is not a complete checkpoint: resume from an earlier one")
    try:
        saved = state["stateful_callbacks"]["UpdateCallback"]["attributes"]["settings"]
    except (KeyError, TypeError) as error:
        raise OtaroError(f"{checkpoint} was not written by otaro tune: it holds nothing to go on from") from error
    for name, value in settings.items():
        if saved.get(name) != value:
            raise OtaroError(
                f"{checkpoint} is of a run with {name} {saved.get(name)}, not {value}: "
                "resume with the settings the run was begun with, or start a new one"
            )
    return int(state["global_step"])
