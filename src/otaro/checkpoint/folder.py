"""Reading a packed folder: what it holds, whether it is whole, and the planes of a width."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from otaro.checkpoint.layout import (
    DTYPE_NAMES,
    QUANT_METHOD,
    VERSION,
    Entry,
    Layout,
    Part,
    file_name,
    index_name,
    parts,
    read_layout,
    signed_header,
)
from otaro.errors import FormatError, PrecisionError
from otaro.json_file import LARGEST_INDEX, read_json
from otaro.model_config import check_no_adapter
from otaro.packing import SCALE, Planes, split_key
from otaro.precision import NARROWEST, Precision, join
from otaro.progress import Progress
from otaro.safetensors_file import DTYPES, SafetensorsFile, is_shape, tensor_bytes
from otaro.sefp import Format, check_scales

CHUNK = 1 << 22


@dataclass(frozen=True)
class Info:
    """What a packed folder holds."""

    folder: Path
    architecture: str
    source: str
    version: int
    format: Format
    embedding_floor: Precision
    precisions: list[Precision]
    """The widths that can be had, the widest first."""
    parameters: int
    packed_parameters: int
    clamped_groups: int
    files: dict[str, int]
    _width_bytes: dict[Precision, int] = field(repr=False)
    _plane_bits: dict[Precision, int] = field(repr=False)

    def size(self, precision: Precision) -> int:
        """Bytes of weight files read at that width."""
        stored = self.format.stored(precision)
        return sum(size for width, size in self._width_bytes.items() if width <= stored)

    def bits_per_weight(self, precision: Precision) -> float:
        """Bits of a packed weight at that width, scales included, on average."""
        stored = self.format.stored(precision)
        bits = sum(bits for width, bits in self._plane_bits.items() if width <= stored)
        return bits / self.packed_parameters if self.packed_parameters else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "architecture": self.architecture,
            "source": self.source,
            "version": self.version,
            **Layout(self.format, self.embedding_floor).to_json(),
            "parameters": self.parameters,
            "packed_parameters": self.packed_parameters,
            "clamped_groups": self.clamped_groups,
            "precisions": {
                str(precision): {
                    "bytes": self.size(precision),
                    "bits_per_weight": round(self.bits_per_weight(precision), 4),
                }
                for precision in self.precisions
            },
            "files": self.files,
        }


class PackedFolder:
    """A packed model on disk. Opening it reads the config alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = self._read_config()
        described = self.config.get("quantization_config")
        if not isinstance(described, dict) or described.get("quant_method") != QUANT_METHOD:
            raise FormatError(f"{path} is not a packed model: run `otaro pack {path} OUT` first")
        self.described: dict[str, Any] = described
        self._check_version(described.get("version"), "config.json")
        self.layout = read_layout(described, "config.json")
        self.format = self.layout.format

    def _read_config(self) -> dict[str, Any]:
        path = self.path / "config.json"
        if not self.path.exists():
            raise FormatError(f"{self.path} does not exist")
        check_no_adapter(self.path, self.path)
        if not path.is_file():
            raise FormatError(f"{self.path} is not a model folder: it has no config.json")
        try:
            config = read_json(path)
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise FormatError(f"{path} is not valid JSON ({error}): fetch it again") from error
        if not isinstance(config, dict):
            raise FormatError(f"{path} is not a JSON object: fetch it again")
        return config

    @cached_property
    def declared(self) -> list[Precision]:
        """The widths the folder was made with, the widest first; files may have been deleted since."""
        try:
            widths = sorted((Precision(name) for name in self.described["widths"]), reverse=True)
        except (KeyError, TypeError, PrecisionError):
            widths = []
        if not widths:
            raise FormatError("config.json does not list the widths of the folder: fetch it again")
        return widths

    @cached_property
    def pack(self) -> str:
        """The id that all files of the pack carry."""
        return self._first_headers[0].metadata["sefp_pack"]

    @cached_property
    def precisions(self) -> list[Precision]:
        """The widths whose files are all there, the widest first."""
        return [precision for precision in self.declared if not self._missing(precision)]

    @cached_property
    def entries(self) -> list[Entry]:
        """Every tensor of the model, in the order of the files."""
        packed = [entry for file in self._first_headers for entry in self._packed_in(file)]
        planes = {part.key for entry in packed for _, part in parts(entry, self.format)}
        plain = [
            Entry(name, info.shape, info.dtype)
            for file in self._first_headers
            for name, info in file.tensors.items()
            if name not in planes
        ]
        return plain + packed

    def widths(self, precision: Precision) -> list[Precision]:
        """The widths whose files are read at that width, the narrowest first."""
        return [width for width in sorted(Precision) if width <= self.format.stored(precision)]

    def check_declared(self, precision: Precision) -> None:
        if precision not in self.declared:
            raise PrecisionError(f"{self.path} does not hold precision {precision}: it holds {join(self.declared)}")

    def check_available(self, precision: Precision) -> None:
        self.check_declared(precision)
        missing = self._missing(precision)
        if missing:
            held = f"this folder holds {join(self.precisions)}" if self.precisions else "every precision needs it"
            ask = f" or ask for precision {self.precisions[0]}" if self.precisions else ""
            raise FormatError(f"{missing} is missing: {held}; fetch that file{ask}")

    def check_headers(self, precision: Precision) -> list[SafetensorsFile]:
        """The files of a width, closed again; an error if one is missing, of another pack, or lacks a tensor."""
        self.check_available(precision)
        files = []
        for width in self.widths(precision):
            with ExitStack() as stack:
                files += self._open(width, stack)
        return files

    def check(self, precision: Precision, progress: Progress | None = None) -> None:
        """Read the files of a width and make sure that they are whole, unaltered and of one pack."""
        files = self.check_headers(precision)
        sizes = [file.path.stat().st_size for file in files]
        done = 0
        with ThreadPoolExecutor(4) as pool:
            for file, size, _ in zip(files, sizes, pool.map(self.read_through, files), strict=True):
                done += size
                if progress is not None:
                    progress(f"checking {file.path.name}", done, sum(sizes))

    def read_through(self, file: SafetensorsFile, out: BinaryIO | None = None) -> None:
        """Read one of the files from end to end, and write it to `out`; at its end an error if it was altered."""
        checksum = hashlib.sha256()
        with file.path.open("rb", buffering=0) as stream:
            header = stream.read(file.data_start)
            if out is not None:
                out.write(header)
            while chunk := stream.read(CHUNK):
                checksum.update(chunk)
                if out is not None:
                    out.write(chunk)
        self._check_sum(file, checksum)

    def info(self) -> Info:
        with ExitStack() as stack:
            widths = self.widths(max(self.precisions, default=NARROWEST))
            headers = {width: self._open_any(width, stack) for width in widths}
        sizes = {width: sum(file.path.stat().st_size for file in files) for width, files in headers.items()}
        bits: dict[Precision, int] = dict.fromkeys(headers, 0)
        packed = [entry for entry in self.entries if entry.floor is not None]
        for entry in packed:
            for width, part in parts(entry, self.format):
                if width in bits:
                    bits[width] += part.nbytes * 8
        counts = {entry.name: math.prod(entry.shape) for entry in self.entries}
        architectures = self.config.get("architectures")
        architecture = architectures[0] if isinstance(architectures, list) and architectures else "unknown"
        clamped = self.described.get("clamped_groups")
        return Info(
            folder=self.path,
            architecture=str(architecture),
            source=str(self.described.get("source", "unknown")),
            version=self.described["version"],
            format=self.format,
            embedding_floor=self.layout.embedding_floor,
            precisions=self.precisions,
            parameters=sum(counts.values()),
            packed_parameters=sum(counts[entry.name] for entry in packed),
            clamped_groups=clamped if type(clamped) is int else 0,
            files={file.path.name: file.path.stat().st_size for files in headers.values() for file in files},
            _width_bytes=sizes,
            _plane_bits=bits,
        )

    def planes(self, width: Precision) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one width's files, (key, tensor), in the order they lie in, each byte read once.

        Whether a file was altered is known at its end: nothing may be used until the iterator is through.
        """
        with ExitStack() as stack:
            for file in self._open(width, stack):
                checksum = hashlib.sha256()
                for name in file.tensors:
                    tensor = file.read(name)
                    checksum.update(tensor_bytes(tensor))
                    if split_key(name)[1] == SCALE:
                        check_scales(tensor, self.format, f"{name} of {file.path.name}")
                    yield name, tensor
                self._check_sum(file, checksum)

    def tensors(self, precision: Precision) -> Iterator[tuple[Entry, Planes | Tensor]]:
        """Every tensor of the model, its planes if it is packed, from a width's files; one at a time, as `planes`."""
        readers = {width: self.planes(width) for width in self.widths(precision)}
        for entry in self.entries:
            found: dict[str, Tensor] = {}
            for width, part in parts(entry, self.format):
                if width in readers:
                    key, tensor = next(readers[width])
                    if key != part.key:
                        raise FormatError(f"{file_name(width)} holds {key} where {part.key} belongs: fetch it again")
                    found[split_key(key)[1]] = tensor
            yield entry, tensor if entry.floor is None else Planes.from_named(found)
        for reader in readers.values():
            next(reader, None)  # to the end, where it checks

    def check_held(self, held: Mapping[str, Tensor]) -> None:
        """Check tensors of the narrowest width that something else has read from its files; the rest is read here."""
        with ExitStack() as stack:
            for file in self._open(NARROWEST, stack):
                checksum = hashlib.sha256()
                for name, info in file.tensors.items():
                    tensor = held.get(name)
                    if tensor is None or tensor.is_meta or (tensor.dtype, tensor.shape) != (info.dtype, info.shape):
                        tensor = file.read(name)
                    checksum.update(tensor_bytes(tensor))
                self._check_sum(file, checksum)

    def paths(self, width: Precision) -> list[Path]:
        """The files that hold one width's planes, there or not."""
        single, index = self.path / file_name(width), self.path / index_name(width)
        if single.is_file() or not index.is_file():
            return [single]
        try:
            names = sorted(set(read_json(index, LARGEST_INDEX)["weight_map"].values()))
            paths = [self.path / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{index.name} is not an index of weight files: fetch it again") from error
        if not paths:
            raise FormatError(f"{index.name} names no weight files: fetch it again")
        for path in paths:
            if path.parent != self.path:
                raise FormatError(f"{index.name} points outside the folder: fetch it again")
        return paths

    def _missing(self, precision: Precision) -> str | None:
        """The first file that a width lacks."""
        for width in self.widths(precision):
            for path in self.paths(width):
                if not path.is_file():
                    return path.name
        return None

    @cached_property
    def _first_headers(self) -> list[SafetensorsFile]:
        with ExitStack() as stack:
            return self._open_any(NARROWEST, stack)

    @cached_property
    def _expected(self) -> dict[Precision, set[Part]]:
        """What the files of each width should hold."""
        expected: dict[Precision, set[Part]] = {}
        for entry in self.entries:
            for width, part in parts(entry, self.format):
                expected.setdefault(width, set()).add(part)
        return expected

    def _open(self, width: Precision, stack: ExitStack) -> list[SafetensorsFile]:
        """The files of a width that belong to this pack and hold, by their headers, all they should."""
        files = self._open_any(width, stack)
        found = {Part(name, info.dtype, info.shape) for file in files for name, info in file.tensors.items()}
        different = sorted(part.key for part in found ^ self._expected.get(width, set()))
        if different:
            raise FormatError(f"{file_name(width)} does not hold {different[0]} as it should: fetch it again")
        return files

    def _open_any(self, width: Precision, stack: ExitStack) -> list[SafetensorsFile]:
        """The files of a width, whatever tensors they hold."""
        files = []
        for path in self.paths(width):
            if not path.is_file():
                held = "every precision needs it" if width == NARROWEST else f"{width} needs it"
                raise FormatError(f"{path.name} is missing: {held}; fetch that file")
            file = stack.enter_context(SafetensorsFile(path))
            metadata = file.metadata
            self._check_version(metadata.get("sefp_version"), path.name)
            layout = read_layout(_json(metadata.get("sefp_layout"), path.name), path.name)
            if layout != self.layout:
                raise FormatError(f"{path.name} is of another format than config.json says: fetch the folder again")
            if metadata.get("sefp_width") != str(width):
                raise FormatError(f"{path.name} holds {metadata.get('sefp_width')}, not {width}: it was renamed")
            if width > NARROWEST and metadata.get("sefp_pack") != self.pack:
                raise FormatError(f"{path.name} comes from another pack than {file_name(NARROWEST)}: fetch it again")
            if "sefp_pack" not in metadata or "sefp_checksum" not in metadata:
                raise FormatError(f"{path.name} carries no checksum: fetch it again")
            files.append(file)
        if len({file.metadata["sefp_pack"] for file in files}) > 1:
            raise FormatError(f"the shards of {file_name(width)} come from different packs: fetch them again")
        return files

    def _check_version(self, version: Any, place: str) -> None:
        try:
            number = int(version)
        except (TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"{place} states no format version: fetch it again") from error
        if number != VERSION:
            remedy = "upgrade otaro" if number > VERSION else "pack the model again"
            raise FormatError(
                f"{place} is of format version {number}, and this otaro reads version {VERSION}: {remedy}"
            )

    def _packed_in(self, file: SafetensorsFile) -> list[Entry]:
        described = _json(file.metadata.get("sefp_tensors"), file.path.name)
        try:
            return [
                Entry(name, _checked_shape(shape), DTYPES[dtype], Precision(floor))
                for name, (shape, dtype, floor) in described.items()
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{file.path.name} does not list its packed tensors: fetch it again") from error

    def _check_sum(self, file: SafetensorsFile, checksum: Any) -> None:
        """An error if a file was altered; `checksum` has seen its data."""
        tensors = {
            name: {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [info.start, info.end]}
            for name, info in file.tensors.items()
        }
        checksum.update(signed_header(tensors, file.metadata))
        if checksum.hexdigest() != file.metadata["sefp_checksum"]:
            raise FormatError(f"{file.path.name} was altered: its checksum does not match; fetch it again")


def _json(text: str | None, place: str) -> Any:
    try:
        return json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{place} is no file of a packed model: its header lacks the format; fetch it again"
        ) from error


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not shape or not is_shape(shape) or 0 in shape:
        raise ValueError("not the shape of a packed tensor")
    return tuple(shape)
