"""The way into transformers: loading a packed folder as an ordinary model that can switch its precision.

transformers loads the first file (everything E5M3 needs) as it loads any checkpoint; the quantizer registered here puts
packed layers in place before that and attaches the planes of the wider widths after it. A loaded model is of its
ordinary class with :class:`SefpModel` mixed in, which adds switching and saving.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from otaro import convert
from otaro.checkpoint import PackedFolder, save
from otaro.checkpoint.layout import (
    QUANT_METHOD,
    VERSION,
    Entry,
    Layout,
    file_name,
    first_stored,
    index_name,
    read_layout,
    stem,
)
from otaro.errors import FormatError, OtaroError, foreign_code
from otaro.model_config import load_config, modules_bounded
from otaro.nn import SefpWeight
from otaro.packing import Planes, plane_key, split_key
from otaro.precision import EMBEDDING_FLOOR, NARROWEST, WIDEST, Precision, join
from otaro.progress import Progress
from otaro.sefp import check_scales


class OtaroConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How a model is packed: transformers' `quantization_config`, in a packed folder or passed to `from_pretrained`.

    Passed for a model that is not packed, it packs the model in memory, to be used at `precision` (the widest if left
    out). For a packed folder transformers ignores what is passed: :func:`load` takes a precision.
    """

    def __init__(
        self,
        scheme: str = "nested",
        group_size: int = 64,
        embedding_floor: str = str(EMBEDDING_FLOOR),
        precision: str | None = None,
        **described: Any,
    ) -> None:
        self.quant_method = QUANT_METHOD
        self.version = described.pop("version", VERSION)
        self.scheme = scheme
        self.group_size = group_size
        self.embedding_floor = embedding_floor
        self.precision = precision
        described.pop("quant_method", None)
        self.described = described

    @property
    def layout(self) -> Layout:
        return read_layout(vars(self), "quantization_config")

    def to_dict(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name not in ("described", "precision")}
        return {**fields, **self.layout.to_json(), **self.described}


class OtaroQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts packed layers into a model before its first file is loaded and completes them afterwards."""

    quantization_config: OtaroConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        _ = self.quantization_config.layout

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            return
        self.folder = PackedFolder(Path(kwargs["checkpoint_files"][0]).parent)
        files = sorted(Path(file).name for file in kwargs["checkpoint_files"])
        if files != [path.name for path in self.folder.paths(NARROWEST)]:
            raise OtaroError(f"{self.folder.path}/config.json names other weights than its first file: fetch it again")
        asked = self.quantization_config.precision
        if asked is None:
            self._fetch_missing(model)
            self.folder.check_available(min(self.folder.declared))
            self.precision = self.folder.precisions[0]
        else:
            self.precision = Precision(asked)
        self.folder.check_headers(self.precision)
        format = self.folder.format
        targets = {t.name: t for t in convert.find_targets(model, self.folder.layout.embedding_floor).values()}
        packed = [entry for entry in self.folder.entries if entry.floor is not None]
        self._check_complete(model, targets)
        for entry in packed:
            target = targets.get(entry.name)
            if target is None or target.shape != entry.shape:
                raise OtaroError(f"{entry.name} of {self.folder.path.name} does not fit the model its config describes")
            floor = cast(Precision, entry.floor)
            convert.replace(model, target, convert.packed_layer(model, target, format, first_stored(floor, format)))
        convert.tie(model, {targets[entry.name].parameter: targets[entry.name] for entry in packed})

    def _check_complete(self, model: Any, targets: dict[str, convert.Target]) -> None:
        """What the folder lacks, transformers would make up."""
        names = {target.parameter: target.name for target in targets.values()}
        held = {entry.name for entry in self.folder.entries}
        for parameter in model.state_dict():
            if parameter not in model.all_tied_weights_keys and names.get(parameter, parameter) not in held:
                raise OtaroError(f"{self.folder.path} lacks the tensor {parameter} that its config speaks of")

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            self._attach_planes(model)
        else:
            layout = self.quantization_config.layout
            clamped = convert.pack(model, layout.format, layout.embedding_floor)
            self.precision = Precision(self.quantization_config.precision or WIDEST)
            self.quantization_config.described |= {"clamped_groups": clamped}
        # Norms and biases are all that could be trained, and asking for it would keep every decoded weight in memory.
        model.requires_grad_(False)
        mix_in(model)
        model.set_precision(self.precision)
        return model

    def _attach_planes(self, model: Any) -> None:
        self.folder.check_held(model.state_dict())
        layers = cast(dict[str, SefpWeight], convert.sefp_layers(model))
        for name, layer in layers.items():
            check_scales(layer.planes.scale, layer.format, name)
        for width in self.folder.widths(self.precision)[1:]:
            for key, plane in self.folder.planes(width):
                layer = layers[split_key(key)[0]]
                layer.attach(width.mantissa, plane.to(layer.planes.base.device))
        self.quantization_config.described |= {"pack": self.folder.pack}
        model.__dict__["_sefp_dtypes"] = {entry.name: entry.dtype for entry in self.folder.entries}
        model.__dict__["_sefp_config_dtype"] = self.folder.config.get("dtype")
        del self.folder  # a model can be copied, its quantizer with it, but not the files of a folder

    def _fetch_missing(self, model: Any) -> None:
        """transformers fetches the first file alone from the hub: get the others, or say that they are missing."""
        if self.folder.precisions == self.folder.declared:
            return
        name, place = model.config.name_or_path, self.folder.path
        # In the cache a model lies under CACHE/models--ORG--NAME/snapshots/COMMIT, in a subfolder perhaps.
        commit = next((path for path in (place, *place.parents) if path.parent.name == "snapshots"), None)
        if commit is not None and not Path(name).exists():
            inside = place.relative_to(commit)
            patterns = [(inside / file).as_posix() for file in _weight_files(self.folder, self.folder.declared[0])]
            _fetch(name, patterns, revision=commit.name, cache_dir=commit.parents[2])
            self.folder = PackedFolder(place)
        if self.folder.precisions != self.folder.declared:
            held = join(self.folder.precisions)
            warnings.warn(f"otaro: only {held} of {join(self.folder.declared)} is here", stacklevel=2)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


class SefpModel:
    """Mixed into the class of a packed model."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights' values; there may be no parameter left that transformers could ask."""
        return self._any_tensor.dtype

    @property
    def device(self) -> torch.device:
        return self._any_tensor.device

    @property
    def _any_tensor(self) -> Tensor:
        model = cast(Any, self)
        parameter: Tensor | None = next(model.parameters(), None)
        if parameter is not None:
            return parameter
        return cast(SefpWeight, next(iter(convert.sefp_layers(model).values()))).values_like

    @property
    def precision(self) -> Precision:
        """The width the model was last set to; layers with an override or a floor may be at another."""
        return self.__dict__["_sefp_precision"]

    @property
    def precisions(self) -> list[Precision]:
        """The widths the model can be set to, the widest first."""
        widest = min(convert.available(layer) for layer in convert.sefp_layers(cast(Any, self)).values())
        return [precision for precision in Precision if precision <= widest]

    def set_precision(self, precision: Precision | str, overrides: Mapping[str, Precision | str] | None = None) -> None:
        """Switch every layer to a width; no weight is copied or read.

        `overrides` maps patterns of layer names to other widths: ``{"lm_head": "E5M8", "model.layers.0.*": "E5M6"}``.
        """
        precision = Precision(precision)
        parsed = {pattern: Precision(other) for pattern, other in (overrides or {}).items()}
        convert.set_precision(cast(Any, self), precision, parsed)
        self.__dict__["_sefp_precision"] = precision

    @contextlib.contextmanager
    def at_precision(
        self, precision: Precision | str, overrides: Mapping[str, Precision | str] | None = None
    ) -> Iterator[None]:
        """Switch for a block of code, then back to how every layer was before."""
        layers = cast(dict[str, SefpWeight], convert.sefp_layers(cast(Any, self)))
        before, own = {name: layer.precision for name, layer in layers.items()}, self.precision
        self.set_precision(precision, overrides)
        try:
            yield
        finally:
            for name, layer in layers.items():
                layer.precision = before[name]
            self.__dict__["_sefp_precision"] = own

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: packed layers that share their weights share their planes."""

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the model as a packed folder, up to the width it holds. The folder must not hold a model yet."""
        if not kwargs.pop("is_main_process", True):
            return
        harmless = ("safe_serialization", "max_shard_size", "save_function")
        unsupported = sorted(name for name, value in kwargs.items() if value and name not in harmless)
        if unsupported:
            raise OtaroError(f"a packed model cannot be saved with {unsupported[0]}: only the folder can be chosen")
        model = cast(Any, self)
        described = model.config.quantization_config
        config = model.config.to_dict()
        config["architectures"] = [type(model).__name__]
        for name in ("_name_or_path", "quantization_config"):
            config.pop(name, None)
        config["dtype"] = self.__dict__.get("_sefp_config_dtype") or config.get("dtype")
        save(
            save_directory,
            _contents(model),
            config,
            described.layout,
            self.precisions[0],
            {key: described.described[key] for key in ("source", "clamped_groups") if key in described.described},
            described.described.get("pack"),
            model.generation_config.save_pretrained if model.can_generate() else None,
        )


def _contents(model: Any) -> Iterator[tuple[Entry, Planes | torch.Tensor]]:
    layers = cast(dict[str, SefpWeight], convert.sefp_layers(model))
    planes = {plane_key(name, key) for name, layer in layers.items() for key in layer._buffers}
    packed = set()
    # A model may compute in another type than its weights were packed from: they are saved as they were.
    dtypes: dict[str, torch.dtype] = model.__dict__.get("_sefp_dtypes", {})
    for name, tensor in model.state_dict().items():
        owner, _ = split_key(name)
        if name not in planes:
            if name not in model.all_tied_weights_keys:
                tensor = tensor.to(dtypes.get(name, tensor.dtype))
                yield Entry(name, tuple(tensor.shape), tensor.dtype), tensor
        elif owner not in packed:
            packed.add(owner)
            layer = layers[owner]
            dtype = dtypes.get(owner, layer.values_like.dtype)
            yield Entry(owner, layer.shape, dtype, layer.floor), layer.planes


def mix_in(model: Any) -> None:
    """Give a model the methods of :class:`SefpModel`; its class keeps its name, which configs record."""
    if not isinstance(model, SefpModel):
        model.__class__ = type(type(model).__name__, (SefpModel, type(model)), {"__module__": type(model).__module__})
    # The experts' own loop asks for one expert at a time; the fused kernels would decode all of them.
    if any(type(layer) is SefpWeight for layer in convert.sefp_layers(model).values()):
        model.set_experts_implementation("eager")


def load(
    folder: str | Path,
    precision: Precision | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Any:
    """A packed folder (or hub name) as a transformers model, reading only the files that `precision` needs.

    Without `precision` the widest that is there. `dtype` is what the model computes in: by default float32 on a CPU and
    the type of the original weights elsewhere.
    """
    from transformers import AutoModelForCausalLM

    from otaro.quiet import quiet

    path = local(folder, precision)
    packed = PackedFolder(path)
    packed.check_available(min(packed.declared) if precision is None else Precision(precision))
    device = torch.device(device or "cpu")
    if progress is not None:
        progress("loading", 0, 1)
    width = packed.precisions[0] if precision is None else Precision(precision)
    chosen = dtype or (torch.float32 if device.type == "cpu" else "auto")
    config = load_config(path, packed.config)
    said = f"config.json of {path.name} cannot be used"
    with foreign_code(said, FormatError), modules_bounded(len(packed.entries)), quiet():
        config.quantization_config["precision"] = str(width)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=chosen, device_map=str(device), trust_remote_code=False
        )
    if progress is not None:
        progress("loading", 1, 1)
    return model.eval()


def local(folder: str | Path, precision: Precision | str | None, *, revision: str | None = None, **place: Any) -> Path:
    """The folder itself, or a download of what a width needs from the hub; `place` may hold a cache_dir."""
    from otaro.sources import HUB_NAME
    from otaro.sources.folder import EXTRAS, HUB_IGNORED

    path = Path(folder).expanduser()
    if path.exists() or not isinstance(folder, str) or HUB_NAME.fullmatch(folder) is None:
        return path
    # The config says which files the width needs; the rest is fetched at the commit it came from.
    path = _fetch(folder, ["config.json", *EXTRAS], ignore_patterns=HUB_IGNORED, revision=revision, **place)
    packed = PackedFolder(path)
    widest = packed.declared[0] if precision is None else Precision(precision)
    packed.check_declared(widest)
    return _fetch(folder, _weight_files(packed, widest), revision=path.name, **place)


def _weight_files(packed: PackedFolder, precision: Precision) -> list[str]:
    """Patterns of the files that a width reads, sharded or not."""
    widths = packed.widths(precision)
    return [
        name for width in widths for name in (file_name(width), index_name(width), f"{stem(width)}-*-of-*.safetensors")
    ]


def _fetch(name: str, patterns: list[str], **options: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, **options))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise OtaroError(f"there is no folder {name}, and the hub could not be asked for it") from error


with contextlib.suppress(ValueError):  # raised where the name is taken: this module was imported before
    register_quantization_config(QUANT_METHOD)(OtaroConfig)
    register_quantizer(QUANT_METHOD)(OtaroQuantizer)
