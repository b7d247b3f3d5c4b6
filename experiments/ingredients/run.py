"""What each part of the recipe is good for, in settings that run on a CPU.

    python -m experiments.ingredients.run --data DIR --settings far,near,wiki

`experiments.stories.prepare` and then `experiments.ingredients.prepare` make DIR.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments import tuning

RUNS = (
    *(f"{name}+averaged" for name in ("fp16", "fixed-E5M4", "fixed-E5M3")),
    *("tiers", "tiers+fitting_pull=0.0", "tiers+last-weights"),
)
SETTINGS = {
    "far": {"model": "model", "text": "."},
    "near": {"model": "model", "text": "near"},
    "wiki": {"model": "wiki", "text": "."},
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="with commas between")
    parser.add_argument("--runs", default=",".join(RUNS), help="with commas between")
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    given = parser.parse_args()
    for name in given.settings.split(","):
        model, text = SETTINGS[name]["model"], given.data / SETTINGS[name]["text"]
        options = {
            "model": given.data / model,
            "train": text / "train.npy",
            "test": text / "test.npy",
            "out": Path(__file__).parent / "runs" / name,
            "runs": given.runs,
            "seeds": given.seeds,
        }
        one = argparse.ArgumentParser()
        tuning.add_arguments(one, RUNS, steps=200, length=128, window=512)
        chosen = one.parse_args([str(part) for option in options.items() for part in (f"--{option[0]}", option[1])])
        tuning.run_all(chosen, Path(__file__).parent)
