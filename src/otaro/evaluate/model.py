"""A model under evaluation: loaded once, measured at every width.

A packed folder is measured as it is. Any other model is simulated: its layers pass their weights through the format,
which gives the very values the packed model would decode, and at no width at all it is the model in full precision.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otaro import convert
from otaro.checkpoint import PackedFolder
from otaro.checkpoint.layout import QUANT_METHOD, Entry, Layout, total_bytes
from otaro.errors import OtaroError
from otaro.evaluate.backend import NAMES, Backend, TorchBackend, open_backend
from otaro.evaluate.results import Width
from otaro.json_file import read_json
from otaro.precision import Precision, parse_precisions
from otaro.progress import Progress
from otaro.safetensors_file import tensor_bytes
from otaro.sefp import Format
from otaro.sources import Source, TensorSpec, open_source
from otaro.sources.folder import EXTRAS
from otaro.sources.loading import load_model, save_tokenizer
from otaro.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Cost:
    """What a width takes, packed; `size` is in bytes of weight files."""

    bits_per_weight: float
    size: int


@dataclass(frozen=True)
class Subject:
    """A loaded model that can be set to any of `widths`, the first of which the others are compared with."""

    label: str
    architecture: str
    packed: bool
    backend: Backend
    tokenizer: Any
    widths: list[Width]
    reference: Width
    costs: dict[Width, Cost]
    layout: Layout
    identity: str
    """A digest of everything that decides what the model answers: weights, config, tokenizer, format, arithmetic."""


def find_device(name: str | None) -> torch.device:
    """The device of that name; without one a GPU, if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise OtaroError(f"device {name!r} cannot be used here: choose cpu, cuda or cuda:1") from error
    return device


def open_subject(
    model: str,
    precisions: str,
    device: torch.device,
    backend: str = "auto",
    progress: Progress | None = None,
    remark: Callable[[str], None] = lambda text: None,
) -> Subject:
    """Load a packed folder, or any model that can be packed, to be measured at `precisions`.

    `backend` is "native" (the engine, for packed folders on a CPU), "torch", or "auto": the engine where it can, and
    `remark` is told why where it cannot.
    """
    if backend not in NAMES:
        raise OtaroError(f"there is no backend {backend}: choose {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    folder = Path(model).expanduser()
    if is_packed(folder):
        packed = PackedFolder(folder)
        widths = parse_precisions(precisions, packed.precisions)
        return _open_packed(packed, widths, open_backend(folder, max(widths), device, backend, progress, remark))
    if backend == "native":
        raise OtaroError(f"{model} is not a packed folder, and only those run natively: run `otaro pack {model} OUT`")
    widths = parse_precisions(precisions)
    with open_source(model) as source:
        return _open_plain(source, widths, device, progress)


def is_packed(folder: Path) -> bool:
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    described = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(described, dict) and described.get("quant_method") == QUANT_METHOD


def _open_packed(packed: PackedFolder, widths: list[Precision], backend: Backend) -> Subject:
    info = packed.info()
    return Subject(
        label=packed.path.resolve().name,
        architecture=info.architecture,
        packed=True,
        backend=backend,
        tokenizer=load_tokenizer(packed.path),
        widths=list(widths),
        reference=max(widths),
        costs={width: Cost(info.bits_per_weight(width), info.size(width)) for width in widths},
        layout=packed.layout,
        identity=_identity(packed.pack, packed.path, packed.layout, backend),
    )


def _open_plain(
    source: Source, widths: Sequence[Precision], device: torch.device, progress: Progress | None
) -> Subject:
    layout = Layout(Format())
    weights = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix="otaro-tokenizer-") as extras:
        tokenizer = save_tokenizer(source, Path(extras))
        model, scales = _load_plain(source, layout, device, weights.update, progress)
        convert.simulate(model, layout.format, layout.embedding_floor, scales)
        backend = TorchBackend(model)
        return Subject(
            label=source.label,
            architecture=type(source.model).__name__,
            packed=False,
            backend=backend,
            tokenizer=tokenizer,
            widths=[None, *widths],
            reference=None,
            costs=_costs(source, layout, widths),
            layout=layout,
            identity=_identity(weights.hexdigest(), Path(extras), layout, backend),
        )


def _load_plain(
    source: Source,
    layout: Layout,
    device: torch.device,
    update: Callable[[bytes | memoryview], object],
    progress: Progress | None,
) -> tuple[Any, dict[str, Tensor]]:
    """The source's model, in the type that a packed one would compute in, and the scales that came with its weights;
    `update` sees the bytes of every weight."""
    dtype = torch.float32 if device.type == "cpu" else getattr(torch, source.config["dtype"])
    targets, scales = convert.find_targets(source.model, layout.embedding_floor), {}

    def see(spec: TensorSpec, weight: Tensor) -> None:
        update(spec.name.encode())
        update(tensor_bytes(weight))
        if spec.name in targets:
            scale = source.scale(spec, weight, targets[spec.name].shape, layout.format)
            if scale is not None:
                update(tensor_bytes(scale))
                scales[spec.name] = scale.to(device)

    return load_model(source, progress, dtype, see).to(device).eval(), scales


def _costs(source: Source, layout: Layout, widths: Sequence[Precision]) -> dict[Width, Cost]:
    """What the widths would take if the model were packed."""
    targets = convert.find_targets(source.model, layout.embedding_floor)
    packed = [Entry(target.name, target.shape, torch.uint8, target.floor) for target in targets.values()]
    rest = [Entry(spec.name, spec.shape, spec.dtype) for spec in source.tensors if spec.name not in targets]
    weights = sum(torch.Size(entry.shape).numel() for entry in packed)
    costs: dict[Width, Cost] = {}
    for width in widths:
        size = total_bytes(packed, layout.format, width)
        costs[width] = Cost(8 * size / weights, size + total_bytes(rest, layout.format, width))
    return costs


def _identity(weights: str, folder: Path, layout: Layout, backend: Backend) -> str:
    computed = f"{backend.name} {backend.dtype} {backend.device.partition(':')[0]}"
    digest = hashlib.sha256(f"{weights} {layout.to_json()} {computed}".encode())
    paths = {path for pattern in ("config.json", *EXTRAS) for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
