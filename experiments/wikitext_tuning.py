"""Tune on WikiText-2 with every method, and measure each tuned model at every width on the test split.

    python experiments/wikitext_tuning.py --train wiki.train.tokens --test wiki.test.tokens --json FILE
    python experiments/wikitext_tuning.py --train wiki.train.tokens --test wiki.test.tokens --quick      # on a CPU

All runs see the same blocks in the same order and take the same number of batches. `--show FILE` prints an earlier run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch
from torch.utils.data import Dataset

from otaro import convert
from otaro.precision import Precision
from otaro.tune.config import TuneArguments, recipe
from otaro.tune.refresh import Refresher
from otaro.tune.trainer import OtaroTrainer

RUNS: dict[str, dict[str, Any]] = {
    "fp16": {"method": "fp16"},
    "fixed:E5M3": {"method": "fixed:E5M3"},
    "fixed:E5M4": {"method": "fixed:E5M4"},
    "uniform": {"method": "uniform"},
    "bps": {"method": "bps"},
    "otaro (LAA mean)": {"method": "otaro", "delay_apply": "mean"},
    "otaro (LAA sum)": {"method": "otaro", "delay_apply": "sum"},
}


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """A stream of tokens cut into blocks."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.blocks = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


@torch.no_grad()
def at_every_width(model: Any, tokens: torch.Tensor, arguments: argparse.Namespace) -> dict[str, float]:
    refresh = Refresher(model)
    measured = {}
    for precision in Precision:
        convert.set_precision(model, precision)
        refresh()
        measured[str(precision)] = common.perplexity(model.eval(), tokens, arguments.window, arguments.eval_batch)
    refresh.clear()
    for layer in convert.sefp_layers(model).values():
        layer.precision = None
    measured["full"] = common.perplexity(model, tokens, arguments.window, arguments.eval_batch)
    return measured


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    train = torch.from_numpy(common.tokens_of(Path(arguments.train), arguments.model)).long()
    test = torch.from_numpy(common.tokens_of(Path(arguments.test), arguments.model)).long().to(device)
    if arguments.quick:
        arguments.steps, arguments.batch, arguments.window = 4, 2, 256
        test = test[: 4 * arguments.window]
    test_tokens = len(test)
    result: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "steps": arguments.steps,
        "batch": arguments.batch,
        "sequence": arguments.length,
        "seed": arguments.seed,
        "test_tokens": test_tokens,
        "recipe": recipe("default"),
        "machine": common.machine(),
        "perplexity": {},
        "seconds": {},
        "widths": {},
    }
    model = common.load_model(arguments.model, device)
    original = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    settings = {**recipe("default"), "learning_rate": arguments.learning_rate}
    for name, changes in {"before tuning": None, **RUNS}.items():
        if arguments.only and name not in ("before tuning", *arguments.only.split(",")):
            continue
        model = common.load_model(arguments.model, device) if name == "before tuning" else model
        model.load_state_dict(original)
        if name == "before tuning":
            convert.simulate(model, TuneArguments(output_dir="unused").format)
        else:
            with tempfile.TemporaryDirectory() as folder:
                trainer = OtaroTrainer(
                    model,
                    TuneArguments(
                        output_dir=folder,
                        **{**settings, **(changes or {})},
                        max_steps=arguments.steps,
                        per_device_train_batch_size=arguments.batch,
                        bf16=device.type == "cuda",
                        seed=arguments.seed,
                        data_seed=arguments.seed,
                        save_strategy="no",
                        report_to=[],
                        disable_tqdm=True,
                        logging_steps=50,
                        torch_compile=arguments.compile,
                    ),
                    train_dataset=Blocks(train, arguments.length),
                )
                started = time.perf_counter()
                trainer.train()
                result["seconds"][name] = time.perf_counter() - started
                result["widths"][name] = {str(width): count for width, count in trainer.path.counts.items()}
                del trainer
        result["perplexity"][name] = at_every_width(model, test, arguments)
        print(name, {key: round(value, 3) for key, value in result["perplexity"][name].items()}, flush=True)
        if arguments.json:
            common.write_json(Path(arguments.json), result)
    return result


def show(result: dict[str, Any]) -> None:
    names = [*(str(precision) for precision in Precision), "full"]
    print(f"\n| run | {' | '.join(name.removeprefix('E5') for name in names)} |")
    print("|---" * (len(names) + 1) + "|")
    for run_name, measured in result["perplexity"].items():
        print(f"| {run_name} | {' | '.join(f'{measured[name]:.2f}' for name in names)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file or a Hugging Face folder")
    parser.add_argument("--train", help="WikiText-2's wiki.train.tokens, or its token ids as .npy")
    parser.add_argument("--test", help="WikiText-2's wiki.test.tokens, or its token ids as .npy")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--eval-batch", type=int, default=16)
    parser.add_argument("--only", help="these runs only, comma-separated")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--json", help="write the results there, after every run")
    parser.add_argument("--quick", action="store_true", help="four small steps each, for a look")
    parser.add_argument("--show", help="print the table of an earlier run and stop")
    arguments = parser.parse_args()
    if arguments.show:
        show(json.loads(Path(arguments.show).read_text()))
    elif arguments.train and arguments.test:
        show(run(arguments))
    else:
        parser.error("--train and --test, or --show, are needed")


if __name__ == "__main__":
    main()
