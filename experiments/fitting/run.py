"""How long tiers are fitted, and in which steps: several fits of the same tuned weights.

    python -m experiments.fitting.run --train wiki.train.tokens --test wiki.test.tokens --json FILE

The weights are tuned once; each fit begins with them. Perplexity is measured in bf16 where passes are.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from experiments import common, tuning
from otaro.json_file import write_json
from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.tune import finishing, report
from otaro.tune import trainer as trainers
from otaro.tune.data import text_blocks
from otaro.tune.recipe import RECIPES
from otaro.tune.tiers import drop_tiers

WIDTHS = (Precision.E5M8, Precision.E5M5, Precision.E5M4, Precision.E5M3)
FITS: tuple[dict[str, float], ...] = (
    {},
    *({"fitting": share} for share in (0.2, 0.4)),
    *({"fitting_step": step} for step in (0.0075, 0.015, 0.03)),
    *({"fitting_pull": pull} for pull in (0.5, 4.0)),
)
RECIPE = "of a fit"


def start_again(trainer: Any, weights: dict[str, torch.Tensor]) -> None:
    """Put tuned weights back and have their scales found anew."""
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            weight.copy_(weights[name])
    drop_tiers(trainer.model)
    trainer.weights, trainer.done = Refresher(trainer.model, trainer.weights.dtype), False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tuning.add_arguments(parser, (), windows=60)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    train, test = (common.tokens_of(path, arguments.model) for path in (arguments.train, arguments.test))
    test = test[: arguments.windows * arguments.window]
    settings = {key: getattr(arguments, key) for key in tuning.SETTINGS}
    result: dict[str, Any] = {"settings": settings, "machine": common.machine(), "fits": []}
    options = {"max_steps": arguments.steps, "per_device_train_batch_size": arguments.batch, "bf16": arguments.bf16}
    device = common.device().type
    with tempfile.TemporaryDirectory(prefix="otaro-experiment-") as folder:
        blocks = text_blocks(train, arguments.length)
        trainer = tuning.make_trainer(common.load_model(arguments.model), blocks, "tiers", 0, folder, **options)
        with mock.patch.object(trainers, "finish"):
            trainer.train()
        weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        trainer.args.recipe = RECIPE
        for constants in FITS:
            RECIPES[RECIPE] = replace(RECIPES["default"], **constants)
            started = time.perf_counter()
            start_again(trainer, weights)
            finishing.finish(trainer, fresh=True)
            seconds = time.perf_counter() - started
            with torch.autocast(device, torch.bfloat16, enabled=arguments.bf16):
                measured = report.measure(trainer, test, WIDTHS, arguments.window, batch_size=8)
            used = {name: getattr(RECIPES[RECIPE], name) for name in ("fitting", "fitting_step", "fitting_pull")}
            result["fits"].append({"constants": used, "perplexity": measured, "seconds": seconds})
            print(constants, {width: round(value, 3) for width, value in measured.items()}, flush=True)
            write_json(result, arguments.json)


if __name__ == "__main__":
    main()
