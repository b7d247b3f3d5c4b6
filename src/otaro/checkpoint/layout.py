"""The packed folder: what is called what, and which byte lies in which file.

    config.json             the model's config; its `quantization_config` describes the format
    model-m3.safetensors    all that E5M3 needs: of every packed tensor the base and the scales (NAME.sefp_base,
                            NAME.sefp_scale), and the tensors that stay as they are
    model-m4.safetensors    bit 4 of every code (NAME.sefp_bit4), and so on up to
    model-m8.safetensors    bit 8

so a precision is a prefix of the files. A tensor with a floor keeps the planes up to it in the first file. Large files
are sharded the usual way: model-m3-00001-of-00002.safetensors and model-m3.safetensors.index.json.

Every file's header says to which format, width and pack it belongs and carries a SHA-256 over its data and the rest of
the header, so a file that was altered, mixed up or cut short is found before any weight is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from otaro.errors import FormatError
from otaro.packing import WIDTHS, plane_key, plane_shapes
from otaro.precision import EMBEDDING_FLOOR, NARROWEST, Precision
from otaro.safetensors_file import DTYPES
from otaro.sefp import Format

QUANT_METHOD = "otaro"
VERSION = 2
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLANK = "0" * 64
"""Stands in a header for a SHA-256 that is not known yet."""


@dataclass(frozen=True)
class Layout:
    """What all files of one pack agree on."""

    format: Format
    embedding_floor: Precision = EMBEDDING_FLOOR

    def to_json(self) -> dict[str, Any]:
        return {
            "scheme": self.format.scheme,
            "group_size": self.format.group_size,
            "embedding_floor": str(self.embedding_floor),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Layout:
        return cls(Format(fields["scheme"], fields["group_size"]), Precision(fields["embedding_floor"]))


@dataclass(frozen=True)
class Entry:
    """A tensor of the model: packed, with the width it never goes below, or stored as it is (floor None)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    floor: Precision | None = None


@dataclass(frozen=True)
class Part:
    """A tensor in a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def parts(entry: Entry, format: Format) -> Iterator[tuple[Precision, Part]]:
    """What the files hold of a tensor, and in which width's file each part lies."""
    if entry.floor is None:
        yield NARROWEST, Part(entry.name, entry.dtype, entry.shape)
        return
    first = first_stored(entry.floor, format)
    for plane, shape in plane_shapes(entry.shape, format).items():
        width = WIDTHS[plane]
        yield NARROWEST if width <= first else width, Part(plane_key(entry.name, plane), torch.uint8, shape)


def first_stored(floor: Precision, format: Format) -> Precision:
    """The widest code of a tensor with that floor that lies in the first file."""
    return NARROWEST if floor == NARROWEST else format.stored(floor)


def file_order(entries: list[Entry]) -> list[Entry]:
    """The order in the files: tensors stored as they are first, the widest types before the others, for alignment."""
    plain = [entry for entry in entries if entry.floor is None]
    plain.sort(key=lambda entry: -entry.dtype.itemsize)
    return plain + [entry for entry in entries if entry.floor is not None]


def total_bytes(entries: list[Entry], format: Format, precision: Precision) -> int:
    """Bytes of data in the files of a width and all narrower ones."""
    stored = format.stored(precision)
    return sum(part.nbytes for entry in entries for width, part in parts(entry, format) if width <= stored)


def stem(width: Precision) -> str:
    return f"model-m{width.mantissa}"


def file_name(width: Precision, shard: int = 1, shards: int = 1) -> str:
    suffix = "" if shards == 1 else f"-{shard:05d}-of-{shards:05d}"
    return f"{stem(width)}{suffix}.safetensors"


def index_name(width: Precision) -> str:
    return f"{stem(width)}.safetensors.index.json"


def header_bytes(tensors: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """A safetensors header, its length included, filled up to a multiple of eight."""
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def signed_header(tensors: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """What a checksum covers of a header: everything but the checksum."""
    rest = {key: text for key, text in metadata.items() if key != "sefp_checksum"}
    return json.dumps([tensors, rest], sort_keys=True, separators=(",", ":")).encode()


def read_layout(fields: Any, place: str) -> Layout:
    """A layout from JSON; `place` names the file in the error."""
    try:
        return Layout.from_json(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{place} does not describe a format this otaro knows ({error}): fetch it again") from error
