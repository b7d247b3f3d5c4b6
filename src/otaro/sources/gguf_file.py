"""Reading one GGUF file, a tensor at a time, without mapping it into memory.

    header      "GGUF", version, number of tensors, number of metadata entries
    metadata    key, type, value; text is a length and UTF-8 bytes, an array a type, a length and its items
    tensors     name, dimensions (the fastest-moving first), type, offset from the start of the data
    data        from the next multiple of `general.alignment`

The `gguf` package knows the block formats; its reader maps the file and makes an object of every vocabulary entry, so
the header is walked here, with a bound on every count before it is believed.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from otaro.errors import SourceError
from otaro.safetensors_file import is_shape

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32
SLAB_ELEMENTS = 1 << 22
LARGEST_HEADER = 64_000_000
MOST_ITEMS = 1 << 21
"""Texts and tensors of a header; a vocabulary of 262,000 tokens with its merges has 800,000 texts."""
MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file: its shape in torch's order, `start` in bytes from the beginning of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    row_bytes: int


class GgufFile:
    """An open GGUF file; a file that is truncated or does not add up is a :class:`SourceError` that names it."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            self._file: BinaryIO = path.open("rb")
            self._size = path.stat().st_size
        except OSError as error:
            raise SourceError(f"{path.name} cannot be opened: {error.strerror}") from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    metadata: dict[str, Any]
    """Numbers and texts; arrays are read by :meth:`array`."""
    tensors: dict[str, GgufTensor]

    def array(self, key: str) -> list[Any] | None:
        """The numbers or texts of an array of the metadata, if there is one of that name."""
        if key not in self._arrays:
            return None
        kind, count, start, end = self._arrays[key]
        self._file.seek(start)
        data = self._take(end - start)
        if kind in SCALARS:
            return list(struct.unpack(f"<{count}{SCALARS[kind][1:]}", data))
        items, place = [], 0
        for _ in range(count):
            begin = place + 8
            place = begin + int.from_bytes(data[place:begin], "little")
            items.append(self._decode(data[begin:place]))
        return items

    def read(self, name: str) -> NDArray[numpy.float32]:
        """The tensor's values, dequantised a slab of rows at a time."""
        tensor = self.tensors[name]
        columns = tensor.shape[-1] if tensor.shape else 1
        rows = math.prod(tensor.shape[:-1])
        values = numpy.empty((rows, columns), numpy.float32)
        slab = max(1, SLAB_ELEMENTS // max(1, columns))
        self._file.seek(tensor.start)
        for first in range(0, rows, slab):
            count = min(slab, rows - first)
            data = numpy.frombuffer(self._take(count * tensor.row_bytes), numpy.uint8).reshape(count, tensor.row_bytes)
            try:
                values[first : first + count] = dequantize(data, tensor.kind)
            except NotImplementedError as error:
                raise SourceError(f"{self.name} holds {name} as {tensor.kind.name}, which is not supported") from error
        return values.reshape(tensor.shape)

    def close(self) -> None:
        self._file.close()

    def _read_header(self) -> None:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise SourceError(f"{self.name} is not a GGUF file: it does not begin with the letters GGUF")
        version, tensor_count, entry_count = self._unpack("<IQQ")
        if version not in VERSIONS:
            raise SourceError(f"{self.name} is GGUF version {version}: versions 2 and 3 are supported")
        self.metadata = {}
        self._arrays: dict[str, tuple[int, int, int, int]] = {}
        self._items = 0
        for _ in range(self._plausible(entry_count, 13)):
            key = self._text()
            kind = self._unpack("<I")[0]
            if kind == ARRAY:
                self._arrays[key] = self._skip_array()
            else:
                self.metadata[key] = self._value(kind)
        entries = [self._tensor_entry() for _ in range(self._plausible(tensor_count, 24))]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._corrupt(f"an alignment of {alignment}")
        data_start = -(-self._file.tell() // alignment) * alignment
        self.tensors = {}
        for name, shape, kind, offset in entries:
            self.tensors[name] = self._checked_tensor(name, shape, kind, data_start + offset)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        (dimensions,) = self._unpack("<I")
        if dimensions > MOST_DIMENSIONS:
            raise self._corrupt(f"tensor {name} has {dimensions} dimensions")
        shape = self._unpack(f"<{dimensions}Q")
        kind, offset = self._unpack("<IQ")
        return name, shape[::-1], kind, offset

    def _checked_tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        if not is_shape(list(shape)):
            raise self._corrupt(f"tensor {name} has the shape {shape}")
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise SourceError(f"{self.name} holds {name} in the unknown type {kind}") from error
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        columns = shape[-1] if shape else 1
        if columns % block:
            raise self._corrupt(f"rows of {columns} in {name} are not whole blocks of {block}")
        row_bytes = columns // block * block_bytes
        end = start + math.prod(shape[:-1]) * row_bytes
        if end > self._size:
            raise self._truncated(f"tensor {name} ends at byte {end}, the file at {self._size}")
        return GgufTensor(shape, quantization, start, row_bytes)

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._unpack(SCALARS[kind])[0]
        if kind == STRING:
            return self._text()
        raise self._corrupt(f"metadata of type {kind}")

    def _skip_array(self) -> tuple[int, int, int, int]:
        """Type and number of the items, and where in the file they begin and end."""
        item_kind, count = self._unpack("<IQ")
        start = self._file.tell()
        if item_kind in SCALARS:
            item_bytes = struct.calcsize(SCALARS[item_kind])
            self._take(self._plausible(count, item_bytes) * item_bytes)
        elif item_kind == STRING:
            for _ in range(self._plausible(count, 8)):
                self._take(self._plausible(self._unpack("<Q")[0], 1))
        else:
            raise self._corrupt(f"an array of type {item_kind} in its metadata")
        return item_kind, count, start, self._file.tell()

    def _text(self) -> str:
        return self._decode(self._take(self._plausible(self._unpack("<Q")[0], 1)))

    def _decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._corrupt("text that is not UTF-8") from error

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise self._truncated(f"it ends {count - len(data)} bytes early")
        return data

    def _plausible(self, count: int, item_bytes: int) -> int:
        """`count`, once the rest of the file has room for that many items, and the header may be so large."""
        if count * item_bytes > self._size - self._file.tell():
            raise self._truncated(f"{count} items of its header do not fit into the rest of the file")
        if item_bytes >= 8:  # those are looked at one by one
            self._items += count
        if self._items > MOST_ITEMS or self._file.tell() + count * item_bytes > LARGEST_HEADER:
            raise self._corrupt(f"its header goes on for more than {MOST_ITEMS} items or {LARGEST_HEADER} bytes")
        return count

    def _truncated(self, reason: str) -> SourceError:
        return SourceError(f"{self.name} is truncated or corrupt: {reason}; download it again")

    def _corrupt(self, reason: str) -> SourceError:
        return SourceError(f"{self.name} is corrupt: {reason}; download it again")
