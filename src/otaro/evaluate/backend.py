"""What computes a model's logits: torch, through transformers, or the native engine.

torch computes with the exact values of the weights, in float32 on a CPU. The engine rounds activations: to 16 bits here
in every product, which keeps perplexity within a hundredth of a per cent of torch's. As deployed it takes 8 bits for
some products of narrow widths, which is faster and moves perplexity by a few tenths of a per cent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from otaro import convert
from otaro.engine.architecture import open_native
from otaro.engine.engine import usable_cores
from otaro.engine.session import Session, Work
from otaro.engine.weights import Weights
from otaro.errors import OtaroError, foreign_code
from otaro.evaluate.perplexity import POSITIONS_PER_SLICE
from otaro.evaluate.results import Width
from otaro.hf import load
from otaro.nn import FakeSefp
from otaro.precision import Precision
from otaro.progress import Progress
from otaro.refresh import Refresher

NAMES = ("auto", "native", "torch")


class Backend(Protocol):
    """A loaded model that can be run at any of its widths."""

    name: str
    dtype: str
    """What activations are computed in."""
    device: str
    description: str
    """All of this for a person, after "computed"."""
    config: Any

    def logits(self, tokens: Tensor, widths: Sequence[Width]) -> Iterator[tuple[int, Width, Tensor]]:
        """The logits after each token, [positions, vocabulary], with the first of the positions and the width.

        They come part by part, a part at all widths in turn.
        """


class TorchBackend:
    """transformers' own code, with packed layers or simulated ones."""

    name = "torch"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.device = str(model.device)
        self.description = f"by torch on {self.device}, in {self.dtype}"
        self.config = model.config
        self._weights = Refresher(model) if any(isinstance(layer, FakeSefp) for layer in model.modules()) else None
        self._scales_known = False

    @torch.inference_mode()
    def set_width(self, width: Width) -> None:
        if self._weights is None:
            assert width is not None, "a packed model has no full precision"
            convert.set_precision(self.model, width)
            return
        # Weights do not change: their scales are found once, their values made when the width changes.
        if width != self._weights.width or not self._scales_known:
            self._weights.set_width(width, again=self._scales_known)
            self._scales_known |= width is not None

    @torch.inference_mode()
    def logits(self, tokens: Tensor, widths: Sequence[Width]) -> Iterator[tuple[int, Width, Tensor]]:
        batch = tokens[None].to(self.model.device)
        for width in widths:
            self.set_width(width)
            with foreign_code("transformers cannot run this model"):
                logits = self.model(input_ids=batch, use_cache=False).logits[0]
            yield 0, width, logits


class NativeBackend:
    """The C++ engine, with a text of its own at every width, so that all of them can go on by turns."""

    name = "native"
    dtype = "int16"
    device = "cpu"
    description = "by the native engine on the CPU, with activations of 16 bits"

    def __init__(self, folder: Path, precision: Precision, progress: Progress | None = None) -> None:
        self._threads = usable_cores()
        self._weights = Weights(folder, precision, threads=self._threads, progress=progress)
        self._sessions: dict[Precision, Session] = {}
        self._work = Work(self._weights.model, fine=True)
        self.config = self._weights.config

    def logits(self, tokens: Tensor, widths: Sequence[Width]) -> Iterator[tuple[int, Width, Tensor]]:
        ids = tokens.tolist()
        for first in range(0, len(ids), POSITIONS_PER_SLICE):
            part = ids[first : first + POSITIONS_PER_SLICE]
            for width in widths:
                yield first, width, self.run(part, first, width, len(ids), len(part))

    def run(self, tokens: Sequence[int], position: int, width: Width, longest: int, rows: int) -> Tensor:
        """Go on with the text of a width at a position; the last rows of logits. `longest` is what a text may have."""
        assert width is not None, "a packed model has no full precision"
        session = self._sessions.get(width)
        if session is None or session.context < longest:
            session = self._sessions[width] = Session(self._weights.model, longest)
        widths = self._weights.widths(width)
        logits = self._work.logits(session, tokens, position, widths, threads=self._threads, rows=rows)
        return torch.from_numpy(logits)


def open_backend(
    folder: Path,
    precision: Precision,
    device: torch.device,
    name: str,
    progress: Progress | None,
    remark: Callable[[str], None],
) -> Backend:
    """A packed folder up to a width; on a CPU by the engine, if it can and `name` lets it. `remark` hears if not."""
    if device.type == "cpu":
        native = open_native(folder, name, "torch", lambda: NativeBackend(folder, precision, progress), remark)
        if native is not None:
            return native
    elif name == "native":
        raise OtaroError(f"the native engine does not run on {device}: leave out --device or --backend")
    return TorchBackend(load(folder, precision, device=device, progress=progress))
