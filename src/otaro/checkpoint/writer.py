"""Writing a packed folder, a tensor at a time: nothing is kept in memory but the tensor being written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from otaro.checkpoint.layout import (
    BLANK,
    DTYPE_NAMES,
    VERSION,
    Entry,
    Layout,
    Part,
    file_name,
    file_order,
    header_bytes,
    index_name,
    parts,
    signed_header,
)
from otaro.errors import OtaroError
from otaro.packing import BASE, Planes, plane_key
from otaro.partial import new_folder, partial_path
from otaro.precision import NARROWEST, Precision
from otaro.safetensors_file import tensor_bytes

SHARD_SIZE = 5_000_000_000


@contextlib.contextmanager
def new_content(out: Path) -> Iterator[Path]:
    """Like `new_folder`, but `out` may be there already, with a tokenizer, say, as long as it holds no model."""
    if not out.is_dir():
        with new_folder(out) as partial:
            yield partial
        return
    if (out / "config.json").exists() or any(out.glob("*.safetensors")):
        raise OtaroError(f"{out} holds a model already: choose another folder or delete it first")
    with partial_path(out, out) as partial:
        partial.mkdir()
        yield partial
        # The config comes last: without it the folder is not taken for a model.
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(out / path.name)


class PackWriter:
    """Writes the files of a pack up to a width into a folder.

    `entries` says everything that will come; :attr:`entries` is the order to add it in, each by :meth:`add`, then
    :meth:`finish`. `pack` is the id of the pack that already packed planes come from; without it the id is made from
    all that is added, which must then be whole (planes up to E5M8).
    """

    def __init__(
        self,
        folder: Path,
        entries: list[Entry],
        layout: Layout,
        precision: Precision,
        *,
        shard_size: int = SHARD_SIZE,
        pack: str | None = None,
    ) -> None:
        self.folder = folder
        self.layout = layout
        self.entries = file_order(entries)
        self._pack = pack
        self._hash = hashlib.sha256(json.dumps(layout.to_json(), sort_keys=True).encode())
        self._next = iter(self.entries)
        stored = layout.format.stored(precision)
        contents: dict[Precision, list[tuple[Entry, Part]]] = {
            width: [] for width in sorted(Precision) if width <= stored
        }
        for entry in self.entries:
            for width, part in parts(entry, layout.format):
                if width in contents:
                    contents[width].append((entry, part))
        self._files = {
            width: _WidthWriter(folder, width, content, layout, shard_size) for width, content in contents.items()
        }

    def add(self, entry: Entry, content: Planes | Tensor) -> None:
        """Write the next of `entries`: its planes, or the tensor itself if it is not packed."""
        if entry != next(self._next, None):
            raise ValueError(f"{entry.name} is not the tensor to come next")
        self._hash.update(f"{entry.name} {list(entry.shape)} {entry.dtype}".encode())
        tensors = _by_key(entry, content)
        for width, part in parts(entry, self.layout.format):
            tensor = tensors.get(part.key)
            if tensor is not None:
                data = tensor_bytes(tensor)
                self._hash.update(data)
                if width in self._files:
                    self._files[width].write(part, tensor, data)

    def finish(self) -> str:
        """Complete every file; returns the name of the first width's file, or of its index."""
        pack = self._pack or self._hash.hexdigest()
        for file in self._files.values():
            file.finish(pack)
        return self._files[NARROWEST].entry_point

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class _WidthWriter:
    """The file of one width, or its shards."""

    def __init__(
        self, folder: Path, width: Precision, content: list[tuple[Entry, Part]], layout: Layout, shard_size: int
    ) -> None:
        self.size = sum(part.nbytes for _, part in content)
        groups: list[list[tuple[Entry, Part]]] = [[]]
        filled = 0
        for entry, part in content:
            if groups[-1] and filled + part.nbytes > shard_size:
                groups.append([])
                filled = 0
            groups[-1].append((entry, part))
            filled += part.nbytes
        self._shards = [
            _ShardWriter(folder / file_name(width, number, len(groups)), width, group, layout)
            for number, group in enumerate(groups, 1)
        ]
        self._current = 0
        self._folder, self._width = folder, width

    @property
    def entry_point(self) -> str:
        return index_name(self._width) if len(self._shards) > 1 else self._shards[0].path.name

    def write(self, part: Part, tensor: Tensor, data: memoryview) -> None:
        while self._shards[self._current].is_full:
            self._shards[self._current].close()
            self._current += 1
        self._shards[self._current].write(part, tensor, data)

    def finish(self, pack: str) -> None:
        for shard in self._shards:
            shard.finish(pack)
        if len(self._shards) > 1:
            weight_map = {part.key: shard.path.name for shard in self._shards for _, part in shard.content}
            index = {"metadata": {"total_size": self.size}, "weight_map": weight_map}
            (self._folder / index_name(self._width)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def close(self) -> None:
        for shard in self._shards:
            shard.close()


class _ShardWriter:
    """One safetensors file, its header written first with blanks for what is known last."""

    def __init__(self, path: Path, width: Precision, content: list[tuple[Entry, Part]], layout: Layout) -> None:
        self.path = path
        self.content = content
        self._tensors: dict[str, Any] = {}
        position = 0
        for _, part in content:
            self._tensors[part.key] = {
                "dtype": DTYPE_NAMES[part.dtype],
                "shape": list(part.shape),
                "data_offsets": [position, position + part.nbytes],
            }
            position += part.nbytes
        self._metadata = {
            "format": "pt",
            "sefp_version": str(VERSION),
            "sefp_layout": json.dumps(layout.to_json()),
            "sefp_width": str(width),
            "sefp_pack": BLANK,
            "sefp_checksum": BLANK,
        }
        if width == NARROWEST:
            packed = {
                entry.name: [list(entry.shape), DTYPE_NAMES[entry.dtype], str(entry.floor)]
                for entry, part in content
                if entry.floor is not None and part.key == plane_key(entry.name, BASE)
            }
            self._metadata["sefp_tensors"] = json.dumps(packed)
        self._remaining = [part for _, part in reversed(content)]
        self._checksum = hashlib.sha256()
        self._file: BinaryIO | None = None

    @property
    def is_full(self) -> bool:
        return not self._remaining

    def write(self, part: Part, tensor: Tensor, data: memoryview) -> None:
        if self._remaining.pop() != part or tuple(tensor.shape) != part.shape or tensor.dtype != part.dtype:
            raise ValueError(f"{part.key} of {self.path.name} does not come as announced")
        if self._file is None:
            self._open()
        assert self._file is not None
        self._file.write(data)
        self._checksum.update(data)

    def finish(self, pack: str) -> None:
        if self._remaining:
            raise ValueError(f"{self._remaining[-1].key} of {self.path.name} was not written")
        if self._file is None:
            self._open()
        assert self._file is not None
        self._metadata["sefp_pack"] = pack
        self._checksum.update(signed_header(self._tensors, self._metadata))
        self._metadata["sefp_checksum"] = self._checksum.hexdigest()
        self._file.seek(0)
        self._file.write(header_bytes(self._tensors, self._metadata))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        started = self.path.exists()
        self._file = self.path.open("r+b" if started else "w+b")
        if started:
            self._file.seek(0, os.SEEK_END)
        else:
            self._file.write(header_bytes(self._tensors, self._metadata))


def _by_key(entry: Entry, content: Planes | Tensor) -> dict[str, Tensor]:
    if isinstance(content, Tensor):
        return {entry.name: content}
    return {plane_key(entry.name, plane): tensor for plane, tensor in content.named().items()}
