"""Scales kept beside weights: what a model was tuned with is what is packed.

Weights that were tuned at every width have codes under the scales of the last update. Found anew from the weights, the
scale of a group may be another one and its codes with it. So `otaro tune` writes the scales into a file of their own in
the folder, with a digest of every weight they belong to: should a weight be changed later, its scales are found as
usual.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from otaro.errors import FormatError, SourceError
from otaro.packing import SCALE, plane_shapes
from otaro.safetensors_file import SafetensorsFile
from otaro.sefp import Format, check_scales

SCALES_NAME = "sefp_scales.safetensors"
METADATA = "sefp_scales"


def digest(weight: Tensor) -> str:
    data = weight.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def save_scales(folder: Path, scales: Mapping[str, Tensor], weights: Mapping[str, Tensor], format: Format) -> None:
    """Write the scales of weights by their names, all in one format."""
    described = {
        "scheme": format.scheme,
        "group_size": format.group_size,
        "digests": {name: digest(weights[name]) for name in scales},
    }
    # One entry: the order of several differs from run to run, and equal runs are to give equal files.
    metadata = {METADATA: json.dumps(described)}
    save_file({name: scale.cpu().contiguous() for name, scale in scales.items()}, folder / SCALES_NAME, metadata)


class GivenScales:
    """The scales in a folder, none if it has no such file."""

    def __init__(self, folder: Path) -> None:
        self._file: SafetensorsFile | None = None
        path = folder / SCALES_NAME
        if not path.is_file():
            return
        self._file = SafetensorsFile(path)
        try:
            described = json.loads(self._file.metadata[METADATA])
            self._format = Format(described["scheme"], int(described["group_size"]))
            self._digests: dict[str, str] = dict(described["digests"])
        except (KeyError, ValueError, TypeError, RecursionError, FormatError) as error:
            self.close()
            raise SourceError(f"{SCALES_NAME} does not say what it holds: delete it or tune again") from error

    def find(self, name: str, weight: Tensor, shape: tuple[int, ...], format: Format) -> Tensor | None:
        """The scales of a weight that is packed in that shape and format, if they are of this very weight."""
        if self._file is None or name not in self._file.tensors:
            return None
        if format != self._format:
            # Said once, by default, however many weights there are.
            tuned = f"{self._format.scheme} in groups of {self._format.group_size}"
            warnings.warn(
                f"otaro: the model was tuned for {tuned}: its scales are not used, narrow widths may be worse",
                stacklevel=2,
            )
            return None
        if self._digests.get(name) != digest(weight):
            return None
        scale = self._file.read(name)
        if scale.dtype != torch.uint8 or tuple(scale.shape) != plane_shapes(shape, format)[SCALE]:
            raise SourceError(f"{name} in {SCALES_NAME} does not fit its weight: delete the file or tune again")
        check_scales(scale, format, f"{name} in {SCALES_NAME}")
        return scale

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
