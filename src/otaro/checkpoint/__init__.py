"""The packed folder: make one, look into it, verify it, cut a narrower one from it.

`layout` says what lies where, `writer` writes it streaming, `folder` reads it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from otaro.checkpoint.folder import Info, PackedFolder
from otaro.checkpoint.layout import QUANT_METHOD, VERSION, Entry, Layout, index_name, stem, total_bytes
from otaro.checkpoint.writer import SHARD_SIZE, PackWriter, new_content
from otaro.errors import WeightError
from otaro.packing import Planes
from otaro.partial import new_folder, refuse_existing
from otaro.precision import EMBEDDING_FLOOR, NARROWEST, WIDEST, Precision
from otaro.progress import Progress
from otaro.sefp import Format

__all__ = ["Info", "PackedFolder", "cut", "inspect", "pack", "save", "verify"]


def pack(
    model: str | Path,
    out: str | Path,
    *,
    precision: Precision | str = WIDEST,
    format: Format = Format(),
    embedding_floor: Precision | str = EMBEDDING_FLOOR,
    max_shard_size: int = SHARD_SIZE,
    progress: Progress | None = None,
) -> Info:
    """Pack a model folder, a hub model, a GGUF file or ``smollm2`` into a new folder, up to `precision`.

    Works through the model a tensor at a time. The folder appears under its name when it is whole.
    """
    from otaro.convert import find_targets
    from otaro.sources import open_source

    out, precision, floor = Path(out), Precision(precision), Precision(embedding_floor)
    refuse_existing(out)
    with open_source(model) as source:
        targets = find_targets(source.model, floor)
        specs = {}
        entries = []
        for spec in source.tensors:
            target = targets.get(spec.name)
            if target is None:
                entry = Entry(spec.name, spec.shape, spec.dtype)
            else:
                entry = Entry(target.name, target.shape, spec.dtype, target.floor)
            specs[entry.name] = (spec, target)
            entries.append(entry)
        layout = Layout(format, floor)
        with new_folder(out, total_bytes(entries, format, precision)) as partial:
            writer = PackWriter(partial, entries, layout, precision, shard_size=max_shard_size)
            total = sum(_nbytes(entry) for entry in entries)
            done = clamped = 0
            try:
                for entry in writer.entries:
                    spec, target = specs[entry.name]
                    weight = source.read(spec)
                    if target is None:
                        writer.add(entry, weight)
                    else:
                        scale = source.scale(spec, weight, target.shape, format)
                        planes, counts = _pack_tensor(target.stored_weight(weight), format, spec.name, scale)
                        clamped += int(counts.sum())
                        del weight
                        writer.add(entry, planes)
                    done += _nbytes(entry)
                    if progress is not None:
                        progress(f"packing {entry.name}", done, total)
                entry_point = writer.finish()
            finally:
                writer.close()
            source.save_extras(partial)
            described = {"source": source.label, "clamped_groups": clamped}
            write_config(partial, source.config, layout, precision, entry_point, described)
    return inspect(out)


def save(
    out: str | Path,
    contents: Iterable[tuple[Entry, Planes | Tensor]],
    config: dict[str, Any],
    layout: Layout,
    precision: Precision,
    described: dict[str, Any],
    pack: str | None,
    save_extras: Callable[[Path], None] | None = None,
) -> None:
    """Write tensors that are packed already, in memory, into a folder that holds no model yet."""
    by_name = {entry.name: (entry, content) for entry, content in contents}
    with new_content(Path(out)) as partial:
        writer = PackWriter(partial, [entry for entry, _ in by_name.values()], layout, precision, pack=pack)
        try:
            for entry in writer.entries:
                writer.add(*by_name[entry.name])
            entry_point = writer.finish()
        finally:
            writer.close()
        write_config(partial, config, layout, precision, entry_point, described)
        if save_extras is not None:
            save_extras(partial)


def inspect(folder: str | Path) -> Info:
    """What a packed folder holds, from its config and headers."""
    return PackedFolder(Path(folder)).info()


def verify(folder: str | Path, progress: Progress | None = None) -> Info:
    """Read every file and make sure that all are whole, unaltered and of one pack."""
    packed = PackedFolder(Path(folder))
    info = packed.info()
    if not info.precisions:
        packed.check_available(min(packed.declared))
    widest = info.precisions[0]
    beyond = [
        w for w in sorted(Precision) if w > packed.format.stored(widest) and list(packed.path.glob(f"{stem(w)}*"))
    ]
    packed.check(max([widest, *beyond]), progress)
    return info


def cut(folder: str | Path, out: str | Path, precision: Precision | str, progress: Progress | None = None) -> Info:
    """A new folder with the same model up to `precision`: the same bytes as packing it to that width."""
    precision, packed, out = Precision(precision), PackedFolder(Path(folder)), Path(out)
    refuse_existing(out)
    files = packed.check_headers(precision)
    with new_folder(out, sum(file.path.stat().st_size for file in files)) as partial:
        weights = {path.name for width in Precision for path in packed.path.glob(f"{stem(width)}*")}
        for path in packed.path.rglob("*"):
            place = path.relative_to(packed.path)
            if path.is_file() and str(place) not in weights and str(place) != "config.json":
                (partial / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, partial / place)
        for number, file in enumerate(files, 1):
            with (partial / file.path.name).open("xb") as copy:
                packed.read_through(file, copy)
            if progress is not None:
                progress(f"copying {file.path.name}", number, len(files))
        for width in packed.widths(precision):
            index = packed.path / index_name(width)
            if index.is_file():
                shutil.copyfile(index, partial / index.name)
        kept = ("source", "clamped_groups")
        described = {key: value for key, value in packed.described.items() if key in kept}
        first = packed.paths(NARROWEST)
        entry_point = first[0].name if len(first) == 1 else index_name(NARROWEST)
        write_config(partial, packed.config, packed.layout, precision, entry_point, described)
    return inspect(out)


def write_config(
    folder: Path,
    config: dict[str, Any],
    layout: Layout,
    precision: Precision,
    entry_point: str,
    described: dict[str, Any],
) -> None:
    """The model's config with the description of the format; `entry_point` is the file transformers loads first."""
    widths = [str(width) for width in Precision if width <= precision]
    described = {"quant_method": QUANT_METHOD, "version": VERSION, **layout.to_json(), "widths": widths, **described}
    config = {**config, "quantization_config": described, "transformers_weights": entry_point}
    text = json.dumps(dict(sorted(config.items())), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _pack_tensor(weight: Tensor, format: Format, name: str, scale: Tensor | None) -> tuple[Planes, Tensor]:
    from otaro import ops

    try:
        return ops.pack(weight, format, scale)
    except WeightError as error:
        raise WeightError(str(error).replace("the tensor", f"tensor {name}", 1)) from error


def _nbytes(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize
