"""At which width should the error decide the scale of a group? Untuned and tuned, on a text that is not the test split.

python -m experiments.error_width.run --train train.npy --test valid.npy --out experiments/error_width/runs/smollm2
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch

from experiments import tuning
from otaro import sefp
from otaro.precision import Precision

METHODS = ("untuned", "fp16", "fixed-E5M3", "fixed-E5M4", "tiers")
CHOICES = (Precision.E5M5, Precision.E5M4)


def decide_by(width: Precision) -> None:
    """Let the error at a width decide from now on, in this process."""
    sefp.ERROR_WIDTH = width
    from otaro.ops import gpu

    gpu.ERROR_WIDTH = width


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tuning.add_arguments(parser, METHODS, steps=200, seeds="0")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU: the native core for CPUs decides by E5M5 always")
    for choice in CHOICES:
        decide_by(choice)
        chosen = copy.copy(arguments)
        chosen.runs = ",".join(f"{name}+by-{choice}" for name in arguments.runs.split(","))
        tuning.run_all(chosen, Path(__file__).parent)
