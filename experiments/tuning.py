"""Tuning runs of experiments: the product's trainer on blocks of tokens, then perplexity at every width.

A run has a name, which says its settings: a method and, after plus signs, what differs from the recipe:

    tiers                   the recipe `default`
    fp16, fixed-E5M3, uniform, bps, otaro
    paper                   the recipe `paper`
    fp16+averaged           with weight averaging, as the recipe has it
    tiers+last-weights      without
    fp16+prompts            prompts learned too, not the completions only; tiers+completions the other way round
    bps+exploration-3       and delay-5 (N of LAA), mean (of held gradients), by-E5M4 (see error_width)
    tiers+only-fitted       the weights stay as they are, all updates fit
    tiers+held_back=0       everything learned, whatever repeats
    tiers+fitting_step=0.1  with another constant of the recipe
    untuned                 the model as it is

Each is written to runs/NAME-seedN.json, and skipped where that file is.
"""

from __future__ import annotations

import argparse
import ast
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainerCallback

from experiments import common
from otaro.json_file import write_json
from otaro.precision import Precision
from otaro.tune import report
from otaro.tune.config import TuneArguments
from otaro.tune.data import Collator, text_blocks
from otaro.tune.recipe import RECIPES, settings
from otaro.tune.trainer import OtaroTrainer

UNTUNED = "untuned"
FORMAT_VERSION = 2
WARM_UP = 20
"""Updates that are not timed."""
SETTINGS = ("steps", "batch", "length", "window", "windows", "tokens", "bf16")
VARIANTS: dict[str, dict[str, Any]] = {
    "averaged": {"average": RECIPES["default"].average},
    "last-weights": {"average": 0.0},
    "prompts": {"completion_only": False},
    "completions": {"completion_only": True},
    "mean": {"delay_apply": "mean"},
    "only-fitted": {"fit_only": True},
}


def run_settings(name: str) -> dict[str, Any]:
    """The settings of a run by its name."""
    method, *variants = name.split("+")
    changes: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for variant in variants:
        option, _, value = variant.rpartition("-")
        if "=" in variant:
            constant, _, value = variant.partition("=")
            constants[constant] = ast.literal_eval(value)
        elif variant in VARIANTS:
            changes |= VARIANTS[variant]
        elif option in ("exploration", "delay"):
            changes[option] = float(value) if option == "exploration" else int(value)
        elif option != "by":
            raise SystemExit(f"there is no variant {variant!r}")
    if method == UNTUNED:
        method = "fp16"
    if method == "paper":
        return settings("paper", **changes)
    recipe = "default"
    if constants:
        recipe = f"default with {constants}"
        RECIPES[recipe] = replace(RECIPES["default"], **constants)
    return settings(recipe, method=method.replace("fixed-", "fixed:"), **changes)


class Clock(TrainerCallback):  # type: ignore[misc]
    """How long updates that tune took. A GPU is waited for twice only, not after every update."""

    def __init__(self, updates: int) -> None:
        self.first = min(WARM_UP, updates - 1)
        self.times: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self.first, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times[state.global_step] = time.perf_counter()

    @property
    def update_seconds(self) -> float | None:
        if len(self.times) < 2:
            return None
        (first, start), (last, end) = sorted(self.times.items())
        return (end - start) / (last - first)


def make_trainer(model: Any, blocks: Dataset[Any], name: str, seed: int, folder: str, **options: Any) -> OtaroTrainer:
    """The run of `otaro tune` with these settings; `options` are of `TuneArguments`."""
    on_gpu = torch.cuda.is_available()
    args = TuneArguments(
        output_dir=folder,
        **{**run_settings(name), "bf16": on_gpu, "use_cpu": not on_gpu, **options},
        seed=seed,
        save_strategy="no",
        report_to="none",
        logging_steps=500,
        disable_tqdm=True,
    )
    return OtaroTrainer(model, args, train_dataset=blocks, data_collator=Collator(0), progress=lambda *_: None)


def tune(model: Any, blocks: Dataset[Any], name: str, seed: int, **options: Any) -> tuple[OtaroTrainer, dict[str, Any]]:
    """Tune a model in place; the trainer, and what is to be recorded of the run."""
    with tempfile.TemporaryDirectory(prefix="otaro-experiment-") as folder:
        trainer = make_trainer(model, blocks, name, seed, folder, **options)
        if name.partition("+")[0] == UNTUNED:
            return trainer, {}
        clock = Clock(trainer.args.max_steps)
        trainer.add_callback(clock)
        started = time.perf_counter()
        trainer.train()
    return trainer, {
        "seconds": time.perf_counter() - started,
        "update_seconds": clock.update_seconds,
        "learning_rate": trainer.args.learning_rate,
        "passes": {str(width): count for width, count in trainer.selector.counts.items()},
        "unsettled_groups": trainer.unsettled,
        "held_back": len(trainer.held_out or ()),
        "kept_update": trainer.watch.update if trainer.watch.ended else trainer.state.global_step,
    }


def perplexities(trainer: OtaroTrainer, tokens: Tensor, window: int) -> dict[str, float]:
    return report.measure(trainer, tokens, [*Precision, None], window, batch_size=8)


def add_arguments(parser: argparse.ArgumentParser, runs: Sequence[str], **defaults: Any) -> None:
    """The options of scripts that tune; `defaults` are other ones than SmolLM2's on WikiText-2."""
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file or a Hugging Face folder")
    parser.add_argument(
        "--train", type=Path, required=True, help="WikiText-2's wiki.train.tokens, or token ids as .npy"
    )
    parser.add_argument("--test", type=Path, required=True, help="the text to measure on, in the same form")
    parser.add_argument("--tokens", type=int, help="tune on so many tokens of the text; left out: all")
    parser.add_argument("--runs", default=",".join(runs), help="with commas between")
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--window", type=int, default=2048, help="tokens that are measured together")
    parser.add_argument("--windows", type=int, help="measure on so many of the text; left out: all")
    parser.add_argument("--learning-rate", type=float, help="left out: the recipe's")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="left out: on a GPU")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--out", type=Path, help="where runs are written, if not beside the script")
    parser.add_argument("--keep", type=Path, help="a folder to save the tuned models in")
    parser.add_argument("--quick", action="store_true", help="a few small updates each, for a look on a CPU")
    parser.set_defaults(**defaults)


def file_of(folder: Path, name: str, seed: int | None) -> Path:
    return folder / (f"{name}.json" if seed is None else f"{name}-seed{seed}.json")


def run_all(
    arguments: argparse.Namespace,
    folder: Path,
    load: Callable[[str], Any] = common.load_model,
    measure: Callable[[OtaroTrainer, Tensor, int], dict[str, Any]] | None = None,
) -> None:
    """Make the runs that are not there yet; `measure` adds to what is recorded beside perplexity."""
    train, test = (common.tokens_of(path, arguments.model) for path in (arguments.train, arguments.test))
    if arguments.quick:
        arguments.steps, arguments.batch, arguments.length, arguments.window = 4, 2, 128, 256
        arguments.out, test = arguments.out or Path(tempfile.mkdtemp(prefix="otaro-quick-")), test[:512]
    if arguments.windows is not None:
        test = test[: arguments.windows * arguments.window]
    folder = arguments.out or folder / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    blocks = text_blocks(train[: arguments.tokens], arguments.length)
    for seed in map(int, arguments.seeds.split(",")):
        for name in arguments.runs.split(","):
            known = None if name.partition("+")[0] == UNTUNED else seed
            path = file_of(folder, name, known)
            if path.exists():
                continue
            options = {} if arguments.learning_rate is None else {"learning_rate": arguments.learning_rate}
            trainer, record = tune(
                load(arguments.model),
                blocks,
                name,
                seed,
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch,
                compile=arguments.compile,
                bf16=arguments.bf16,
                **options,
            )
            record = {
                "run": name,
                "model": Path(arguments.model).name,
                "seed": known,
                "format_version": FORMAT_VERSION,
                "settings": {key: getattr(arguments, key) for key in SETTINGS},
                **record,
                "perplexity": perplexities(trainer, test, arguments.window),
                **(measure(trainer, test, arguments.window) if measure else {}),
                "machine": common.machine(),
            }
            write_json(record, path)
            if arguments.keep is not None:
                trainer.save_model(str(arguments.keep / path.stem))
            print(name, seed, {width: round(value, 3) for width, value in record["perplexity"].items()}, flush=True)


def main(
    script: str,
    about: str | None,
    runs: Sequence[str],
    load: Callable[[str], Any] = common.load_model,
    measure: Callable[[OtaroTrainer, Tensor, int], dict[str, Any]] | None = None,
    **defaults: Any,
) -> None:
    """What a script of runs does: `script` is its file, `about` what it says of itself."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, runs, **defaults)
    run_all(parser.parse_args(), Path(script).parent, load, measure)
