"""What the scripts behind the paper's analysis figures share: gradients at every width, names, rounding, plots."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments import common
from otaro import convert
from otaro.evaluate.results import Width
from otaro.json_file import write_json
from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.tune.config import TuneArguments


def place(parameter: str) -> tuple[int | None, str]:
    """The layer and the kind of a weight by its name: ``model.layers.3.mlp.down_proj.weight`` is (3, "down")."""
    number = re.search(r"\.(\d+)\.", parameter)
    kind = parameter.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj")
    return (None if number is None else int(number[1])), ("embedding" if kind == "embed_tokens" else kind)


def rounded(value: Any, digits: int = 5) -> Any:
    """Numbers, arrays, lists and dictionaries to so many significant digits, ready for JSON."""
    if isinstance(value, dict):
        return {str(key): rounded(item, digits) for key, item in value.items()}
    if isinstance(value, np.ndarray | Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.{digits}g}")
    return str(value) if isinstance(value, Precision) else value


def write(file: str | None, result: dict[str, Any]) -> None:
    """Write what there is so far, where a file was asked for."""
    if file:
        write_json(rounded(result), Path(file))


class Batches:
    """Batches of blocks of a token stream, in an order drawn once: neighbours in the text do not meet by design."""

    def __init__(self, tokens: Tensor, count: int, size: int, length: int, seed: int) -> None:
        blocks = tokens[: len(tokens) // length * length].view(-1, length)
        if count * size > len(blocks):
            raise SystemExit(f"{count} batches of {size} × {length} tokens need a longer text: it has {len(tokens)}")
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        self._chosen = blocks[order[: count * size]].view(count, size, length)

    def __len__(self) -> int:
        return len(self._chosen)

    def pop(self) -> Tensor:
        """Take the last batch out."""
        last, self._chosen = self._chosen[-1], self._chosen[:-1]
        return last

    def __getitem__(self, index: int) -> Tensor:
        return self._chosen[index]


class Gradients:
    """The gradients of one model on any batch at any width; a call leaves them in the parameters' `grad`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.format = TuneArguments(output_dir="unused").format
        convert.simulate(model, self.format)
        self.parameters = dict(model.named_parameters())
        self._weights = Refresher(model)

    def __call__(self, batch: Tensor, width: Width) -> Tensor:
        """Forward and backward; returns the loss."""
        self._weights.set_width(width)
        self.model.zero_grad()
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def targets(self) -> list[str]:
        """The parameters that go through the format, by name."""
        return list(convert.find_targets(self.model))


def load(arguments: argparse.Namespace) -> tuple[Gradients, torch.device]:
    """The model on the best device there is, computing in float32 or, where asked for, in TF32."""
    device = common.device()
    torch.set_float32_matmul_precision("high" if arguments.arithmetic == "tf32" else "highest")
    return Gradients(common.load_model(arguments.model, device)), device


def gradient_arguments(parser: argparse.ArgumentParser, batches: int, arithmetic: str) -> None:
    """The options of the scripts that take gradients."""
    parser.add_argument("--text", help="WikiText-2's wiki.train.tokens, or its token ids as .npy")
    parser.add_argument("--batches", type=int, default=batches)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--seed", type=int, default=0, help="draws the batches")
    parser.add_argument("--arithmetic", choices=("float32", "tf32"), default=arithmetic, help="of products on a GPU")


def main(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    plot: Callable[[dict[str, Any], Path], None],
) -> None:
    """Run and record, or `--show` an earlier record; plot either."""
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file or a Hugging Face folder")
    parser.add_argument("--json", help="write the results there as they come")
    parser.add_argument("--plot", help="draw the figure into this file (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="a small setting for a CPU, minutes")
    parser.add_argument("--show", help="print (and, with --plot, draw) an earlier run and stop")
    arguments = parser.parse_args()
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit(
            "--plot needs matplotlib: pip install matplotlib, or leave --plot out and draw from --json later"
        )
    if arguments.show:
        result = json.loads(Path(arguments.show).read_text(encoding="utf-8"))
    elif arguments.text:
        result = rounded(run(arguments))
    else:
        parser.error("--text or --show is needed")
    show(result)
    if arguments.plot:
        plot(result, Path(arguments.plot))


def figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """An empty figure and its axes, drawn to files only."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, layout="constrained")


def colours(count: int) -> list[Any]:
    """As many colours, light to dark: from the widest width to the narrowest."""
    import matplotlib

    return [matplotlib.colormaps["viridis_r"](0.12 + 0.88 * index / max(count - 1, 1)) for index in range(count)]
