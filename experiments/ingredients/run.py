"""What each part of the recipe is good for: runs without it, beside averaged baselines.

    python -m experiments.ingredients.run --data DIR                                          # on a CPU
    python -m experiments.ingredients.run --data DIR --settings llama-14m,llama-44m           # on a GPU

`experiments.stories.prepare` and then `experiments.ingredients.prepare` make DIR.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from experiments import tuning

RUNS = (
    *(f"{name}+averaged" for name in ("fp16", "fixed-E5M4", "fixed-E5M3")),
    *("tiers", "tiers+fitting=0.2+fitting_step=0.015", "tiers+fitting_pull=0.0", "tiers+last-weights"),
)
SMALL = {"steps": 200, "length": 128, "window": 512}
SETTINGS: dict[str, dict[str, Any]] = {
    "far": {"model": "model", "text": ".", **SMALL},
    "near": {"model": "model", "text": "near", **SMALL},
    "wiki": {"model": "wiki", "text": ".", **SMALL},
    "llama-14m": {"model": "llama-14m", "text": "articles", "steps": 300, "length": 256, "windows": 128},
    "llama-44m": {"model": "llama-44m", "text": "answers", "steps": 300, "length": 256},
}
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--settings", default="far,near,wiki", help="with commas between: " + ", ".join(SETTINGS))
    parser.add_argument("--runs", default=",".join(RUNS), help="with commas between")
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument("--out", type=Path, help="where runs are written, if not beside the script")
    parser.add_argument("--keep", type=Path, help="a folder to save the tuned models in")
    given = parser.parse_args()
    for name in given.settings.split(","):
        setting = dict(SETTINGS[name])
        text = given.data / setting.pop("text")
        options = {
            "model": given.data / setting.pop("model"),
            "train": text / "train.npy",
            "test": text / "test.npy",
            "out": (given.out or Path(__file__).parent / "runs") / name,
            "runs": given.runs,
            "seeds": given.seeds,
        }
        one = argparse.ArgumentParser()
        tuning.add_arguments(one, RUNS, **setting)
        one.set_defaults(keep=given.keep and given.keep / name)
        chosen = one.parse_args([str(part) for option in options.items() for part in (f"--{option[0]}", option[1])])
        tuning.run_all(chosen, Path(__file__).parent)
