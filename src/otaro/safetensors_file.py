"""Reading one safetensors file, a tensor at a time, without mapping it into memory.

    8 bytes     the header's length, little endian
    header      JSON: {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [start, end]}, …,
                "__metadata__": {"KEY": "TEXT"}}; offsets count from the end of the header
    data        the tensors, without gaps

A mapped file's pages count as resident memory once they are touched, so a mapped model would be as large in memory as
on disk; plain reads leave them in the page cache. Every number in the header is checked before any of them is used.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from otaro.errors import FormatError, OtaroError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
LENGTH_BYTES = 8
HEADER_LIMIT = 16_000_000
"""Bytes of a header, about 130 of which describe a tensor."""
MOST_TENSORS = 100_000
MOST_DIMENSIONS = 16
LARGEST_DIMENSION = 2**48


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file; `start` and `end` count bytes from the beginning of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open safetensors file; a context manager. Not for use by several threads at once.

    A file that is truncated or does not add up is a :class:`FormatError` that names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            raise FormatError(f"{path.name} cannot be opened: {error.strerror}") from error
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    tensors: dict[str, TensorInfo]
    """What the file holds, in the order of the data."""
    metadata: dict[str, str]
    data_start: int
    """Where the data begin in the file, in bytes."""

    def read(self, name: str) -> Tensor:
        """The tensor of that name, in memory of its own."""
        info = self.tensors[name]
        try:
            data = torch.empty(info.end - info.start, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            size = info.end - info.start
            raise OtaroError(
                f"there is not enough memory to read {name} from {self.path.name}: it takes {size} bytes"
            ) from error
        self._read_into(self.data_start + info.start, data.numpy().data)
        return data.view(info.dtype).reshape(info.shape)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_into(self, position: int, buffer: memoryview) -> None:
        # An unbuffered read may stop short: the system caps one call at about 2 GB.
        self._file.seek(position)
        filled = 0
        while filled < len(buffer):
            count = self._file.readinto(buffer[filled:])  # type: ignore[attr-defined]
            if not count:
                raise self._truncated(f"it ends {len(buffer) - filled} bytes early")
            filled += count

    def _read_header(self) -> None:
        size = self.path.stat().st_size
        if size < LENGTH_BYTES:
            raise self._truncated(f"it has {size} bytes")
        prefix = bytearray(LENGTH_BYTES)
        self._read_into(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > HEADER_LIMIT:
            raise self._corrupt(f"a header of {length} bytes is not plausible")
        if LENGTH_BYTES + length > size:
            raise self._truncated(f"its header of {length} bytes does not fit into {size} bytes")
        text = bytearray(length)
        self._read_into(LENGTH_BYTES, memoryview(text))
        try:
            header = json.loads(text.decode(), object_pairs_hook=self._unique_keys)
        except FormatError:
            raise
        except (ValueError, RecursionError) as error:
            raise self._corrupt("its header is not JSON") from error
        if not isinstance(header, dict):
            raise self._corrupt("its header is not a JSON object")
        self.metadata = self._checked_metadata(header.pop("__metadata__", {}))
        if len(header) > MOST_TENSORS:
            raise self._corrupt(f"its header names {len(header)} tensors")
        infos = {name: self._checked_info(name, entry) for name, entry in header.items()}
        self.tensors = dict(sorted(infos.items(), key=lambda item: (item[1].start, item[1].end)))
        self.data_start = LENGTH_BYTES + length
        self._check_contiguous(size - self.data_start)

    def _unique_keys(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise self._corrupt("its header names something twice")
        return result

    def _checked_metadata(self, metadata: Any) -> dict[str, str]:
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise self._corrupt("its metadata are not text")
        return metadata

    def _checked_info(self, name: str, entry: Any) -> TensorInfo:
        if not name.isprintable():
            raise self._corrupt("the name of a tensor is not printable text")
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._corrupt(f"the entry of tensor {name} is not understood")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise FormatError(f"{self.path.name} cannot be read: tensor {name} has the unsupported type {dtype!r}")
        if not (is_shape(shape) and is_shape(offsets) and len(offsets) == 2):
            raise self._corrupt(f"shape or position of tensor {name} are not counts that a file can have")
        info = TensorInfo(DTYPES[dtype], tuple(shape), *offsets)
        needed = info.dtype.itemsize * math.prod(shape)
        if info.end - info.start != needed:
            raise self._corrupt(
                f"tensor {name} needs {needed} bytes as {dtype} {shape} but has {info.end - info.start}"
            )
        return info

    def _check_contiguous(self, data_size: int) -> None:
        position = 0
        for name, info in self.tensors.items():
            if info.start != position:
                raise self._corrupt(f"tensor {name} begins at byte {info.start} of the data instead of {position}")
            position = info.end
        if position > data_size:
            raise self._truncated(f"its header describes {position} bytes of data but {data_size} follow")
        if position < data_size:
            raise self._corrupt(f"its header describes {position} bytes of data but {data_size} follow")

    def _truncated(self, reason: str) -> FormatError:
        return FormatError(f"{self.path.name} is truncated: {reason}; copy or download it again")

    def _corrupt(self, reason: str) -> FormatError:
        return FormatError(f"{self.path.name} is corrupt: {reason}; copy or download it again")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's values as they lie in a file."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data


def is_shape(values: Any) -> bool:
    """Whether a value from a file is a list of sizes whose product is a number that can be worked with."""
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS:
        return False
    if not all(type(value) is int and 0 <= value <= LARGEST_DIMENSION for value in values):
        return False
    return math.prod(value or 1 for value in values) < 2**63  # of empty tensors too, which torch multiplies out
