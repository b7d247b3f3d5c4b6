"""Table 1: tune on Alpaca, then the paper's eight zero-shot tasks at every width.

    python -m experiments.alpaca.requests --model smollm2 --tasks-from DIR --out zeroshot.npz
    python -m experiments.alpaca.run tune --alpaca alpaca_data.json --requests zeroshot.npz --scores DIR
    python -m experiments.alpaca.run figures --requests zeroshot.npz --scores DIR --tasks-from DIR

`tune` needs no lm-eval and keeps the scores of every run, NAME-seedN.npz; `figures` turns them into lm-eval's figures,
runs/NAME-seedN.json. `fixed` is, at every width, the run made for it. The last twentieth of Alpaca is held back, and
the perplexity of its completions is measured beside the tasks.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments import common, tuning
from experiments.alpaca.score import batches, metrics, score
from otaro.evaluate.perplexity import exponential
from otaro.json_file import write_json
from otaro.precision import Precision
from otaro.tune.data import IGNORED, Blocks, load_blocks
from otaro.tune.report import as_it_is
from otaro.tune.trainer import OtaroTrainer

NAMES = [str(precision) for precision in Precision]
RUNS = ("untuned", "fp16", "fp16+prompts", "fixed", "fixed+prompts", "tiers", "tiers+completions")
FOLDER = Path(__file__).parent


@torch.no_grad()
def completion_perplexity(trainer: OtaroTrainer, blocks: Blocks, batch: int = 64) -> float:
    """Over what has a label, at the width in use."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    total, count = 0.0, 0
    for first in range(0, len(blocks), batch):
        ids, labels = (torch.tensor(part[first : first + batch]) for part in (blocks.ids, blocks.labels))
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits[:, :-1].float()
        targets = labels[:, 1:].to(model.device)
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        count += int((targets != IGNORED).sum())
    return exponential(total / count)


def tune(arguments: argparse.Namespace) -> None:
    everything = load_blocks([arguments.alpaca], common.load_tokenizer(arguments.model), arguments.length)
    requests = dict(np.load(arguments.requests))
    if arguments.quick:
        arguments.steps, arguments.batch, arguments.seeds = 2, 2, "0"
        requests["continuations"] = requests["continuations"][:20]
        everything = Blocks(everything.ids[:40], everything.labels[:40])
    last = len(everything) - len(everything) // 20
    blocks, held = (
        Blocks(everything.ids[part], everything.labels[part]) for part in (slice(0, last), slice(last, None))
    )
    on_gpu = torch.cuda.is_available()
    prepared = list(batches(requests, 65536 if on_gpu else 2048))
    arguments.scores.mkdir(parents=True, exist_ok=True)
    for seed, name in itertools.product(map(int, arguments.seeds.split(",")), arguments.runs.split(",")):
        # Each width of `fixed` comes from a run of its own.
        made = (
            {name.replace("fixed", f"fixed-{width}"): [width] for width in NAMES} if "fixed" in name else {name: NAMES}
        )
        known = None if name == tuning.UNTUNED else seed
        path = tuning.file_of(arguments.scores, name, known).with_suffix(".npz")
        if path.exists():
            continue
        about = {"run": name, "seed": known, "format_version": tuning.FORMAT_VERSION, "machine": common.machine()}
        about["settings"] = {key: getattr(arguments, key) for key in ("steps", "batch", "length", "learning_rate")}
        scores: dict[str, Any] = {"about": json.dumps(about)}
        for run, widths in made.items():
            trainer, _ = tuning.tune(
                common.load_model(arguments.model),
                blocks,
                run,
                seed,
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch,
                learning_rate=arguments.learning_rate,
            )
            model = trainer.accelerator.unwrap_model(trainer.model)
            for width in widths:
                with as_it_is(model), trainer.at_width(Precision(width), exact=True):
                    scores[f"{width}|perplexity"] = completion_perplexity(trainer, held)
                    autocast = torch.bfloat16 if on_gpu else None
                    likelihoods, greedy = score(model, requests, prepared=prepared, autocast=autocast)
                scores[f"{width}|likelihoods"], scores[f"{width}|greedy"] = likelihoods, greedy
                print(run, seed, width, scores[f"{width}|perplexity"], flush=True)
        np.savez_compressed(path, **scores)


def figures(arguments: argparse.Namespace) -> None:
    from otaro.evaluate.tasks import load_tasks

    requests = dict(np.load(arguments.requests))
    tasks = load_tasks(requests["names"].tolist(), arguments.tasks_from)
    for file in sorted(arguments.scores.glob("*.npz")):
        scores = np.load(file)
        widths = {}
        for width in (key.partition("|")[0] for key in scores.files if key.endswith("|perplexity")):
            likelihoods = scores[f"{width}|likelihoods"]
            widths[width] = {"perplexity": float(scores[f"{width}|perplexity"])}
            widths[width] |= metrics(tasks, requests, likelihoods, scores[f"{width}|greedy"])
            widths[width]["boolq"] |= inclination(tasks["boolq"], requests, likelihoods)
        write_json({**json.loads(str(scores["about"])), "widths": widths}, FOLDER / "runs" / f"{file.stem}.json")


def inclination(task: Any, requests: dict[str, np.ndarray], likelihoods: np.ndarray) -> dict[str, float]:
    """How often yes is said to BoolQ's questions, and the accuracy if as many of them were to be answered no as yes."""
    of_boolq = requests["task"] == requests["names"].tolist().index("boolq")
    limit = int(requests["limit"])
    right = np.array([doc["label"] for doc in itertools.islice(task.eval_docs, None if limit < 0 else limit)])
    yes = likelihoods[of_boolq].reshape(-1, 2).argmax(1)
    return {"says_yes": float(yes.mean()), "balanced": float(np.mean([(yes[right == k] == k).mean() for k in (0, 1)]))}


def difference(
    runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], width: str, tasks: Sequence[str]
) -> tuple[float, float | None] | None:
    """By how much the average accuracy over tasks differs, and the standard error of that over seeds.

    Only seeds that both have are compared: a seed is an order of the data, which moves all runs the same way.
    """
    by_seed = [
        {
            run["seed"]: float(np.mean([run["widths"][width][task]["acc"] for task in tasks]))
            for run in each
            if width in run["widths"]
        }
        for each in (runs, others)
    ]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if not seeds:
        return None
    apart = np.array([by_seed[0][seed] - by_seed[1][seed] for seed in seeds])
    return float(apart.mean()), float(apart.std(ddof=1) / np.sqrt(len(apart))) if len(apart) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("tune", "figures"))
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file or a Hugging Face folder")
    parser.add_argument("--alpaca", type=Path, help="alpaca_data.json")
    parser.add_argument("--requests", type=Path, required=True, help="the tasks' requests, from requests.py")
    parser.add_argument("--scores", type=Path, required=True, help="the folder of the scores")
    parser.add_argument("--tasks-from", default="hub", help="where the documents come from, as in otaro eval")
    parser.add_argument("--runs", default=",".join(RUNS), help="with commas between")
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="the best for fp16 on held-back completions")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="two small updates and twenty requests, for a look")
    arguments = parser.parse_args()
    {"tune": tune, "figures": figures}[arguments.stage](arguments)


if __name__ == "__main__":
    main()
