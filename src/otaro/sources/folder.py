"""Hugging Face folders with safetensors, given by path or fetched from the hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from otaro.errors import FormatError, SourceError, first_line, foreign_code
from otaro.json_file import LARGEST, LARGEST_INDEX, read_json
from otaro.model_config import check_no_adapter, load_config
from otaro.quiet import quiet
from otaro.safetensors_file import SafetensorsFile, TensorInfo
from otaro.sefp import Format
from otaro.sources.base import (
    Source,
    TensorSpec,
    build_model,
    missing_tensor,
    shape_mismatch,
)
from otaro.sources.conversion import Origin, find_origins
from otaro.sources.scales import GivenScales

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
EXTRAS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)
# Repositories may carry the same weights again in another layout.
HUB_IGNORED = ("consolidated*", "*/*.safetensors", "*/*.json", "*.py")
# Paths of the machine the model was saved on, code that is never run, and a name that `dtype` replaces.
DROPPED_FROM_CONFIG = ("_name_or_path", "_commit_hash", "auto_map", "torch_dtype", "quantization_config")


def download(name: str) -> Path:
    """The folder of a hub model in the local cache, fetched if need be."""
    try:
        with quiet():
            folder = snapshot_download(
                name, allow_patterns=[WEIGHTS_INDEX, "*.json", "*.safetensors", *EXTRAS], ignore_patterns=HUB_IGNORED
            )
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{name} is neither a file or folder here nor could it be fetched from the hub ({type(error).__name__}): "
            "check the name and the connection"
        ) from error
    return Path(folder)


class FolderSource(Source):
    """A folder with config.json and model.safetensors, or shards of it with an index."""

    def __init__(self, folder: Path, label: str) -> None:
        self.label = label
        self._folder = folder
        self._files: list[SafetensorsFile] = []
        self._scales: GivenScales | None = None
        try:
            content = _read_config(folder, label)
            self._open_files()
            self._scales = GivenScales(folder)
            self._origins: dict[str, Origin] = {}
            self._build(content)
        except FormatError as error:
            self.close()
            raise SourceError(f"{label} cannot be read: {error}") from error
        except BaseException:
            self.close()
            raise

    def read(self, spec: TensorSpec) -> Tensor:
        return self._read_origin(self._origins[spec.name]).to(spec.dtype)

    def scale(self, spec: TensorSpec, weight: Tensor, shape: tuple[int, ...], format: Format) -> Tensor | None:
        return None if self._scales is None else self._scales.find(spec.name, weight, shape, format)

    def save_extras(self, folder: Path) -> None:
        for pattern in EXTRAS:
            for path in sorted(self._folder.glob(pattern)):
                if path.is_file() and path.suffix != ".py":
                    target = folder / path.relative_to(self._folder)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)

    def close(self) -> None:
        for file in self._files:
            file.close()
        if self._scales is not None:
            self._scales.close()

    def _open_files(self) -> None:
        names = self._weight_files()
        self._home: dict[str, SafetensorsFile] = {}
        self._stored: dict[str, TensorInfo] = {}
        for name in names:
            if not (self._folder / name).is_file():
                raise SourceError(f"{self.label} is incomplete: {name} is missing, fetch that file")
            file = SafetensorsFile(self._folder / name)
            self._files.append(file)
            self._home |= dict.fromkeys(file.tensors, file)
            self._stored |= file.tensors

    def _weight_files(self) -> list[str]:
        if (self._folder / WEIGHTS).is_file():
            return [WEIGHTS]
        if (self._folder / WEIGHTS_INDEX).is_file():
            index = _read_json(self._folder / WEIGHTS_INDEX, self.label, LARGEST_INDEX)
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise SourceError(f"{WEIGHTS_INDEX} of {self.label} has no weight_map: fetch that file again")
            names = sorted({str(name) for name in weight_map.values()})
            for name in names:
                if Path(name).name != name:
                    raise SourceError(f"{WEIGHTS_INDEX} of {self.label} points outside the folder: {name}")
            return names
        if any(self._folder.glob("pytorch_model*.bin")):
            raise SourceError(
                f"{self.label} holds its weights as pickle (.bin), which is not read: convert it to safetensors first"
            )
        raise SourceError(f"{self.label} holds no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX} is there")

    def _build(self, content: dict[str, Any]) -> None:
        stated = content.get("dtype") or content.get("torch_dtype")
        known = isinstance(stated, str) and isinstance(getattr(torch, stated, None), torch.dtype)
        dtype = stated if known else self._floating_dtype()
        config = load_config(self._folder, content)
        with foreign_code(f"config.json of {self.label} cannot be used", SourceError):
            config.dtype = dtype
        self.model = build_model(config, self.label, len(self._stored))
        # As transformers writes it, nothing left to be filled in; of a model of text and images the text part alone.
        stated_config = self.model.config.to_diff_dict()
        self.config = {key: value for key, value in stated_config.items() if key not in DROPPED_FROM_CONFIG}
        self.config |= {"architectures": [type(self.model).__name__], "dtype": dtype}
        self._origins = find_origins(self.model, self._stored, self.label)
        self._settle_ties()
        self.tensors = []
        for name, parameter in self.model.state_dict().items():
            if name in self.model.all_tied_weights_keys:
                continue
            if name not in self._origins:
                raise missing_tensor(name, self.label)
            origin = self._origins[name]
            if origin.shape != tuple(parameter.shape):
                raise shape_mismatch(name, self.label, origin.shape, tuple(parameter.shape))
            self.tensors.append(TensorSpec(name, origin.shape, origin.dtype))

    def _settle_ties(self) -> None:
        """A tied pair may be stored under either name, or twice; stored twice it must not differ."""
        for tied, name in self.model.all_tied_weights_keys.items():
            if tied not in self._origins:
                continue
            if name not in self._origins:
                self._origins[name] = self._origins[tied]
            elif not torch.equal(self._read_origin(self._origins[tied]), self._read_origin(self._origins[name])):
                raise SourceError(
                    f"{self.label} ties {tied} to {name} but stores two different tensors: "
                    "set tie_word_embeddings to false in its config.json"
                )

    def _read_origin(self, origin: Origin) -> Tensor:
        try:
            return origin.group.convert(self.model, lambda key: self._home[key].read(key))[origin.output]
        except FormatError as error:
            raise SourceError(f"{self.label} cannot be read: {error}") from error

    def _floating_dtype(self) -> str:
        floating = (info.dtype for info in self._stored.values() if info.dtype.is_floating_point)
        return str(next(floating, torch.float32)).removeprefix("torch.")


def _read_json(path: Path, label: str, largest: int = LARGEST) -> dict[str, Any]:
    try:
        content = read_json(path, largest)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path.name} of {label} is not readable JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path.name} of {label} is not a JSON object: fetch that file again")
    return content


def _read_config(folder: Path, label: str) -> dict[str, Any]:
    check_no_adapter(folder, label, SourceError)
    if not (folder / "config.json").is_file():
        raise SourceError(f"{label} is not a model folder: it has no config.json")
    content = _read_json(folder / "config.json", label)
    quantization = content.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        if method == "otaro":
            raise SourceError(f"{label} is packed already: run it, or give the model it was packed from")
        raise SourceError(f"{label} is quantised already ({method}): give the model in its original precision")
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise SourceError(f"{label} has the unknown architecture {model_type!r}: this version of transformers lacks it")
    return content
