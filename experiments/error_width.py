"""At which width should the error decide the scale of a group? Untuned and tuned, on a text that is not the test split.

    python experiments/error_width.py --train train.npy --valid valid.npy --json FILE [--model FOLDER] [--seeds 0,1]
    python experiments/error_width.py --show FILE …

`fp16` is tuned once and measured with every choice, the other runs are tuned with each. "kept scales" are runs whose
scales are found once, before the first update, and never change.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import tables
import torch
from lab import Idea, Lab, add_arguments
from recipe_search import chosen, fixed

from otaro import sefp
from otaro.precision import Precision
from otaro.sefp import Format
from otaro.refresh import Refresher

CHOICES = (Precision.E5M5, Precision.E5M4)


def decide_by(width: Precision) -> None:
    """Let the error at a width decide from now on, in this process."""
    sefp.ERROR_WIDTH = width
    if torch.cuda.is_available():
        from otaro.ops import gpu

        gpu.ERROR_WIDTH = width


@contextlib.contextmanager
def kept_scales(lab: Lab, tokens: torch.Tensor) -> Iterator[None]:
    """Scales are those of the weights before tuning, for training and for measuring."""
    call = Refresher.__call__
    lab.reset(Format())
    for refresher in (lab.trained, lab.measured):
        refresher._known.clear()

    def kept(self: Refresher, *, again: bool = False) -> None:
        call(self, again=again or bool(self._known))

    Refresher.__call__ = kept  # type: ignore[method-assign]
    try:
        lab.perplexity(tokens, [*Precision], Format(), len(tokens))
        yield
    finally:
        Refresher.__call__ = call  # type: ignore[method-assign]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, valid = (
        torch.from_numpy(common.tokens_of(Path(path), arguments.model)).long().to(device)
        for path in (arguments.train, arguments.valid)
    )
    blocks = train[: len(train) // arguments.length * arguments.length].view(-1, arguments.length)
    valid = valid[: arguments.valid_tokens]
    settings = {name: getattr(arguments, name) for name in ("steps", "batch", "length", "window", "learning_rate")}
    result: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "settings": {**settings, "valid": Path(arguments.valid).name, "valid_tokens": len(valid)},
        "machine": common.machine(),
        "runs": {},
    }
    lab = Lab(arguments.model, device, compiled=device.type == "cuda")
    widths = [*Precision, None]

    def measure(name: str, seed: int | None = None) -> None:
        row = {"seed": seed, "perplexity": lab.perplexity(valid, widths, Format(), arguments.window)}
        result["runs"].setdefault(name, []).append(row)
        print(name, seed, {width: round(value, 3) for width, value in row["perplexity"].items()}, flush=True)
        if arguments.json:
            common.write_json(Path(arguments.json), result)

    def tune(idea: Idea, seed: int) -> None:
        lab.tune(idea, blocks, arguments.steps, arguments.batch, seed)

    for choice in CHOICES:
        decide_by(choice)
        measure(f"untuned, by {choice}")
    rate = arguments.learning_rate
    for seed in map(int, arguments.seeds.split(",")):
        tune(Idea(fixed(None), rate), seed)
        for choice in CHOICES:
            decide_by(choice)
            measure(f"fp16, by {choice}", seed)
        for choice in CHOICES:
            decide_by(choice)
            for width in (Precision.E5M3, Precision.E5M4):
                tune(Idea(fixed(width), rate), seed)
                measure(f"fixed:{width}, by {choice}", seed)
            tune(chosen(rate), seed)
            measure(f"tiers, by {choice}", seed)
        decide_by(CHOICES[0])
        for width in (Precision.E5M3, Precision.E5M4) if device.type == "cuda" else ():
            with kept_scales(lab, valid[: arguments.window]):
                tune(Idea(fixed(width), rate), seed)
                measure(f"fixed:{width}, by {CHOICES[0]}, kept scales", seed)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, steps=200)
    parser.add_argument("--valid", help="the text to measure on, as token ids or WikiText's file")
    parser.add_argument("--valid-tokens", type=int, default=10**9, help="at most so many of them")
    parser.add_argument("--seeds", default="0", help="with commas between")
    parser.add_argument("--show", nargs="+", help="print the table of earlier runs and stop")
    arguments = parser.parse_args()
    if arguments.show:
        tables.show(tables.together(arguments.show))
    elif arguments.train and arguments.valid:
        tables.show(run(arguments))
    else:
        parser.error("--train and --valid, or --show, are needed")


if __name__ == "__main__":
    main()
