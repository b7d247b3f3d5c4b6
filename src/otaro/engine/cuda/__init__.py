"""The engine on an NVIDIA GPU, behind the same face as on a CPU: `Engine(folder, device="cuda")`.

    launches   which devices there are, and what they can launch
    weights    a folder's planes on a device; `matrices`: several of them as one product; `model`: layers of these
    rows       texts (keys and values) on a device, and rows of a run that point to them
    kernels    what lies between two products, in Triton; `fused` launches them, `plain` is the same in torch
    forward    tokens through the layers
    picking    tokens from logits
    work       steps of many texts: batches, captured graphs, prompts; `ahead`: the next step before it is asked for

The products are those of `otaro.ops.cuda`. All of it but products and kernels runs on a CPU as well, as the device
"plain": this is how it is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otaro.engine.cuda.weights import DeviceWeights
    from otaro.engine.cuda.work import DeviceWork
    from otaro.engine.session import AnySession
    from otaro.precision import Precision
    from otaro.progress import Progress


def open_device(
    folder: Path, precision: Precision | None, device: str, progress: Progress | None
) -> tuple[DeviceWeights, DeviceWork, Callable[[int, Precision | None], AnySession]]:
    """Weights on a device, the work on them, and what makes room for texts."""
    from otaro.engine.cuda.launches import torch_device
    from otaro.engine.cuda.rows import DeviceSession
    from otaro.engine.cuda.weights import DeviceWeights
    from otaro.engine.cuda.work import DeviceWork

    weights = DeviceWeights(folder, precision, device=torch_device(device), progress=progress)
    work = DeviceWork(weights.model)
    return weights, work, lambda context, cache: DeviceSession(weights.model, context, cache=cache)
