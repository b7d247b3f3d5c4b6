"""A packed folder's weights in the engine: loaded up to a width, dropped to a narrower one, raised again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from otaro.checkpoint.folder import PackedFolder
from otaro.engine.architecture import (
    EMBEDDING,
    HEAD,
    matrix_place,
    read_shape,
    stated_config,
    vector_place,
)
from otaro.engine.native import Arena, Matrix, Model, free_heap, matrix_size
from otaro.engine.shape import AnyMatrix, AnyModel, MatrixRole
from otaro.errors import FormatError, PrecisionError
from otaro.json_file import read_json
from otaro.model_config import check_counts, load_config
from otaro.packing import Planes, split_key
from otaro.precision import NARROWEST, Precision
from otaro.progress import Progress


class AnyWeights(ABC):
    """The matrices of a packed model in memory, planes of a width added or freed without touching the others.

    Where that memory is, its kinds say.
    """

    model: AnyModel

    def __init__(self, folder: Path, precision: Precision | None = None, *, progress: Progress | None = None) -> None:
        self.folder = PackedFolder(folder)
        widest = self.folder.precisions[0] if precision is None and self.folder.precisions else NARROWEST
        self.loaded = precision or widest
        """The widest precision that is loaded."""
        self.folder.check_headers(self.loaded)
        self.config = read_config(self.folder)
        self.generation = _read_generation(folder)
        self._matrices: dict[str, AnyMatrix] = {}
        self._shapes = {entry.name: entry.shape for entry in self.folder.entries if entry.floor is not None}
        self._floors = {entry.name: entry.floor for entry in self.folder.entries if entry.floor is not None}
        self._prepare()
        widths = self.folder.widths(self.loaded)
        for number, width in enumerate(widths):
            if progress is not None:
                progress(f"loading {width}", number, len(widths))
            if width == NARROWEST:
                self._load_first()
            else:
                self._load_bits(width)
        self._tie()
        free_heap()
        if progress is not None:
            progress("loading", len(widths), len(widths))

    @abstractmethod
    def _prepare(self) -> None:
        """Make the model, still without weights, or refuse the folder's."""

    @abstractmethod
    def _arena(self, above: Precision | None, width: Precision) -> Any:
        """Room for the planes that a width has beyond a narrower one, or for all of them."""

    @abstractmethod
    def _new_matrix(self, name: str, planes: Planes, arena: Any) -> AnyMatrix:
        """Take a matrix into the model."""

    @abstractmethod
    def _set_vector(self, key: str, tensor: Tensor) -> None:
        """Take in a tensor that is not packed."""

    @abstractmethod
    def _tie(self) -> None:
        """A model without a head of its own uses its embedding."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the packed weights take."""
        return sum(matrix.nbytes for matrix in self._matrices.values())

    @property
    def precisions(self) -> list[Precision]:
        """The widths that can be run now, the widest first."""
        return [precision for precision in Precision if precision <= self.loaded]

    def drop_to(self, precision: Precision) -> None:
        """Free the planes above a width."""
        for name, matrix in self._matrices.items():
            kept = max(precision, self._floors[name])
            for bit in range(kept.mantissa + 1, self.loaded.mantissa + 1):
                matrix.drop_bit(bit)
        self.loaded = min(self.loaded, precision)

    def missing(self, precision: Precision) -> list[Precision]:
        """The widths to add, one after another, before a width can be run."""
        return [width for width in self.folder.widths(precision) if width > self.loaded]

    def add(
        self,
        width: Precision,
        lock: AbstractContextManager[Any] = nullcontext(),
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Read the planes of the next width: all of them, or none if the file is bad or they are not `wanted` any more.

        `lock` is held while a matrix is changed.
        """
        try:
            complete = self._load_bits(width, lock, wanted)
        except BaseException as error:
            self._drop_bit(width, lock)
            if isinstance(error, OSError):
                raise FormatError(f"the planes of {width} cannot be read ({error}): fetch their file again") from error
            raise
        if complete:
            self.loaded = width
        else:
            self._drop_bit(width, lock)
        free_heap()

    def widths(self, precision: Precision, overrides: Mapping[str, Precision | str] | None = None) -> bytes:
        """The width of the embedding, of each layer and of the head: `precision`, but never below a floor.

        `overrides` maps patterns of ``model.embed_tokens``, ``model.layers.N`` and ``lm_head`` to other widths.
        """
        layers = [f"model.layers.{number}" for number in range(self.model.shape.layers)]
        names = [EMBEDDING, *layers, HEAD]
        chosen = dict.fromkeys(names, precision)
        for pattern, width in (overrides or {}).items():
            matching = [name for name in names if fnmatchcase(name, pattern)]
            if not matching:
                raise PrecisionError(f"no layer is called {pattern}: there are {EMBEDDING}, model.layers.N and {HEAD}")
            chosen.update(dict.fromkeys(matching, Precision(width)))
        floor = self._floors[EMBEDDING]
        head_floor = self._floors.get(HEAD, floor)
        chosen[EMBEDDING], chosen[HEAD] = max(chosen[EMBEDDING], floor), max(chosen[HEAD], head_floor)
        loaded = {EMBEDDING: max(self.loaded, floor), HEAD: max(self.loaded, head_floor)}
        missing = next((width for name, width in chosen.items() if width > loaded.get(name, self.loaded)), None)
        if missing is not None:
            raise PrecisionError(f"precision {missing} is not loaded: {self.loaded} is the widest here")
        return bytes(chosen[name].mantissa for name in names)

    def _load_first(self) -> None:
        """Bases, scales and the planes that floors need, and all that is not packed."""
        parts: dict[str, dict[str, Tensor]] = {}
        plain = {entry.name for entry in self.folder.entries if entry.floor is None}
        arena = self._arena(None, NARROWEST)
        for key, tensor in self.folder.planes(NARROWEST):
            if key in plain:
                if not bool(tensor.isfinite().all()):
                    raise FormatError(f"{key} holds numbers that are not finite: the model is broken, fetch it again")
                self._set_vector(key, tensor)
                continue
            name, plane = split_key(key)
            parts.setdefault(name, {})[plane] = tensor
            if len(parts[name]) == 2 + self._floor_bits(name):
                self._matrices[name] = self._new_matrix(name, Planes.from_named(parts.pop(name)), arena)

    def _floor_bits(self, name: str) -> int:
        floor = self._floors.get(name, NARROWEST)
        return floor.mantissa - NARROWEST.mantissa

    def _load_bits(
        self,
        width: Precision,
        lock: AbstractContextManager[Any] = nullcontext(),
        wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        narrower = Precision.from_mantissa(width.mantissa - 1)
        arena = self._arena(narrower, width)
        for key, plane in self.folder.planes(width):
            name, _ = split_key(key)
            with lock:
                if not wanted():
                    return False
                self._matrices[name].set_bit(width.mantissa, plane, arena)
        return True

    def _drop_bit(self, width: Precision, lock: AbstractContextManager[Any]) -> None:
        for name, matrix in self._matrices.items():
            if self._floors[name] < width:
                with lock:
                    matrix.drop_bit(width.mantissa)

    def _check_tied(self) -> None:
        if not self.config.tie_word_embeddings:
            raise FormatError(f"{self.folder.path} holds no {HEAD}: fetch it again")


class Weights(AnyWeights):
    """In native memory."""

    model: Model

    def __init__(
        self, folder: Path, precision: Precision | None = None, *, threads: int = 1, progress: Progress | None = None
    ) -> None:
        self._threads = threads
        super().__init__(folder, precision, progress=progress)

    def _prepare(self) -> None:
        self.model = Model(read_shape(self.folder, self.config))

    def _arena(self, above: Precision | None, width: Precision) -> Arena:
        return Arena(packed_size(self.folder, width) - (0 if above is None else packed_size(self.folder, above)))

    def _new_matrix(self, name: str, planes: Planes, arena: Arena) -> Matrix:
        matrix = Matrix(planes, self._shapes[name], self.folder.format, self._threads, arena)
        place = matrix_place(name)
        assert place is not None
        self.model.set_matrix(*place, matrix)
        return matrix

    def _set_vector(self, key: str, tensor: Tensor) -> None:
        place = vector_place(key)
        assert place is not None
        self.model.set_vector(*place, tensor)

    def _tie(self) -> None:
        if (0, MatrixRole.HEAD) not in self.model.matrices:
            self._check_tied()
            self.model.set_matrix(0, MatrixRole.HEAD, self.model.matrices[0, MatrixRole.EMBEDDING])


def packed_size(folder: PackedFolder, precision: Precision) -> int:
    """Bytes of memory that a folder's packed weights take, loaded up to a width."""
    return sum(
        matrix_size(entry.shape, folder.format, max(precision, entry.floor))
        for entry in folder.entries
        if entry.floor is not None
    )


def read_config(folder: PackedFolder) -> Any:
    """The config of a packed folder, with transformers' help where the file leaves anything open."""
    check_counts(folder.config, f"config.json of {folder.path.name}")
    return stated_config(folder.config) or load_config(folder.path, folder.config)


def _read_generation(folder: Path) -> dict[str, Any]:
    """The model's own settings for generation, as far as there are any."""
    try:
        settings = read_json(folder / "generation_config.json")
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}
