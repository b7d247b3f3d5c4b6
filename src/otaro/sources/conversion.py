"""From the names in a checkpoint to the names in the model.

Checkpoints do not always hold the tensors the model class has: some are only called differently, experts lie in the
files one by one and in the model as one 3-D parameter, fused projections are split. transformers keeps a list of such
conversions for every architecture and applies it while it loads a whole model. Here the same objects are applied to one
target at a time: checkpoint keys are grouped by the target they go to (names only), each group is tried on meta tensors
to learn which targets with which shapes come out of it, and its data are read when one of these is asked for.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from otaro.errors import SourceError, foreign_code
from otaro.safetensors_file import TensorInfo


@dataclass
class Group:
    """The checkpoint tensors that together make one target, or several that come out of one conversion."""

    target: str
    converter: WeightConverter | None
    """None where the tensor is only renamed."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Checkpoint key and the converter's pattern it matched, in the order the converter expects."""

    def convert(self, model: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Every target of the group; `read` gives a checkpoint tensor by its key."""
        if self.converter is None:
            return {self.target: read(self.sources[0][0])}
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.target, key, pattern, functools.partial(read, key))
        with torch.no_grad():
            converted = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


@dataclass(frozen=True)
class Origin:
    """Where one tensor of the model comes from, and what it is once converted."""

    group: Group
    output: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def find_origins(model: PreTrainedModel, stored: Mapping[str, TensorInfo], label: str) -> dict[str, Origin]:
    """For every tensor of the model that the checkpoint has in some form, how it is made."""

    def placeholder(key: str) -> Tensor:
        return torch.empty(stored[key].shape, dtype=stored[key].dtype, device="meta")

    origins = {}
    with foreign_code(f"the names of {label}'s tensors cannot be converted", SourceError):
        groups = _group_by_target(model, list(stored))
    for group in groups:
        said = f"{label} cannot be converted: {group.target} cannot be made from {group.sources[0][0]}"
        with foreign_code(f"{said} and {len(group.sources) - 1} more tensors", SourceError):
            outputs = group.convert(model, placeholder)
        for name, output in outputs.items():
            origins[name] = Origin(group, name, tuple(output.shape), output.dtype)
    return origins


def _group_by_target(model: PreTrainedModel, keys: list[str]) -> list[Group]:
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = model.state_dict()
    prefix = model.base_model_prefix
    groups: dict[str, Group] = {}
    # Some renamings are armed by an earlier key, and experts are stacked as they come: natural order matters.
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if target not in expected and key in expected:
            target, pattern = rename_source_key(key, [], [], prefix, expected)
        if target not in expected:
            continue
        if pattern is not None:
            groups.setdefault(target, Group(target, by_pattern[pattern])).sources.append((key, pattern))
        else:
            groups.setdefault(target, Group(target, None, [(key, key)]))
    return list(groups.values())
