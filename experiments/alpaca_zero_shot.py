"""Table 1: tune on Alpaca, then the paper's eight zero-shot tasks at every width.

    python experiments/alpaca_zero_shot.py prepare --alpaca alpaca_data.json --out alpaca.npz
    python experiments/zero_shot_requests.py …                     # the tasks as token ids, see there
    python experiments/alpaca_zero_shot.py run --alpaca alpaca.npz --requests zeroshot.npz \
        --seeds 0,1,2 --out "scores{seed}.npz"
    python experiments/alpaca_zero_shot.py report --requests zeroshot.npz --scores scores0.npz … --tasks-from DIR \
        --json alpaca_zero_shot.json --plot alpaca_zero_shot.png
    python experiments/alpaca_zero_shot.py report --earlier experiments/alpaca_zero_shot.json     # what is there

`prepare` and `report --scores` need the tokenizer and lm-eval, `run` needs a GPU and neither (`run --quick` is for a
CPU: few and short updates, few requests). Before tuning and after `fp16` and `tiers` every width is scored; each run of
one width at its own. The recipe learns questions too, `fp16` and `fixed` the answers only. Runs that are made only if
`--only` names them: "fp16, questions" and "fixed:E5M3, questions" …, which learn both, and "tiers, answers", the recipe
without questions. Scores are written after every run, so a run that is cut off keeps what it had. The last twentieth of
Alpaca is held back, and the perplexity of its answers measured beside the tasks. `report` takes the scores of several
calls and, with `--earlier`, the figures of earlier reports (of two with the same run, width and seed those that are
named first; scores before figures), and compares runs seed by seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from lab import ASKED, Idea, Lab
from recipe_search import chosen, fixed
from zero_shot_score import batches, score

from otaro.evaluate.documents import TASKS
from otaro.precision import Precision
from otaro.sefp import Format
from otaro.tune.data import IGNORED

NAMES = [str(precision) for precision in Precision]
SETTINGS = ("steps", "batch", "length", "seed", "learning_rate")
QUESTIONS, ANSWERS = ", questions", ", answers"
ROWS = ("before tuning", "fp16", "fixed", "tiers", "fp16" + QUESTIONS, "fixed" + QUESTIONS, "tiers" + ANSWERS)
COMPARED = (
    ("tiers", "fp16"),
    ("tiers", "fixed"),
    ("tiers", "fp16" + QUESTIONS),
    ("tiers", "fixed" + QUESTIONS),
    ("tiers", "tiers" + ANSWERS),
    ("tiers" + ANSWERS, "fp16"),
    ("tiers" + ANSWERS, "fixed"),
)


def prepare(arguments: argparse.Namespace) -> None:
    """Alpaca in blocks, the answers alone to be learned."""
    from transformers import AutoTokenizer

    from otaro.tune.data import load_blocks

    path = common.gguf_path(arguments.model)
    options = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    tokenizer = AutoTokenizer.from_pretrained(path.parent if options else path, **options)
    blocks = load_blocks([str(arguments.alpaca)], tokenizer, arguments.length, longest=arguments.length)
    ids, labels = np.asarray(blocks.ids, dtype=np.uint16), np.asarray(blocks.labels, dtype=np.int32)
    np.savez_compressed(arguments.out, ids=ids, learned=labels >= 0)
    print(f"{len(ids)} blocks, {int((labels >= 0).sum())} of {ids.size} tokens learned")


def ideas(rate: float) -> dict[str, tuple[Idea | None, list[str], bool]]:
    """The runs, the widths each is scored at, and whether it learns questions."""
    alone = {f"fixed:{width}": Idea(fixed(width), rate, format=Format()) for width in reversed(Precision)}
    plain = Idea(fixed(None), rate, format=Format())
    runs: dict[str, tuple[Idea | None, list[str], bool]] = {"tiers": (chosen(rate), NAMES, True)}
    for note, questions in (("", False), (QUESTIONS, True)):
        runs["fp16" + note] = (plain, NAMES, questions)
        for name, idea in alone.items():
            runs[name + note] = (idea, [name.partition(":")[2]], questions)
    return {**runs, "tiers" + ANSWERS: (chosen(rate), NAMES, False), "before tuning": (None, [*NAMES, "full"], False)}


def run(arguments: argparse.Namespace) -> None:
    known = list(ideas(0.0))
    usual = [name for name in known if not name.endswith((QUESTIONS, ANSWERS))]
    only = arguments.only.split(";") if arguments.only else usual
    for name in only:
        if name not in known:
            raise SystemExit(f"there is no run {name!r}, but {'; '.join(known)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alpaca = np.load(arguments.alpaca)
    blocks = torch.from_numpy(alpaca["ids"].astype(np.int64)).to(device)
    is_answer = torch.from_numpy(alpaca["learned"]).to(device)
    requests = dict(np.load(arguments.requests))
    if arguments.quick:
        arguments.steps, arguments.batch = 2, 2
        requests["continuations"] = requests["continuations"][:20]
        arguments.length = 128
        blocks, is_answer = blocks[:20, -arguments.length :], is_answer[:20, -arguments.length :]
    answers, both = torch.where(is_answer, blocks, IGNORED), torch.where(is_answer, blocks, blocks + ASKED)
    held, aims = blocks[-len(blocks) // 20 :], answers[-len(blocks) // 20 :]
    blocks, answers, both = (of[: -len(held)] for of in (blocks, answers, both))
    prepared = list(batches(requests, 65536 if device.type == "cuda" else 2048))
    lab = Lab(arguments.model, device, compiled=device.type == "cuda")
    rates: dict[str, float] = {}
    tried = arguments.learning_rates.split(",")
    for rate in tried if len(tried) > 1 else ():
        lab.tune(
            Idea(fixed(None), float(rate), format=Format()), *(blocks, arguments.steps, arguments.batch), 0, answers
        )
        found = lab.perplexity(held.flatten(), [None], arguments.length, 64, aims.flatten())
        rates[rate] = found["full"]
        print(f"fp16 at {rate}: perplexity of held-back answers {rates[rate]:.3f}", flush=True)
    rate = float(min(tried, key=lambda rate: rates.get(rate, 0.0)))
    machine = common.machine()
    scores: dict[str, Any] = {}
    wanted = [(int(seed), name, run) for seed in arguments.seeds.split(",") for name, run in ideas(rate).items()]
    for seed, name, (idea, widths, questions) in wanted:
        if name not in only:
            continue
        settings = {**{each: getattr(arguments, each) for each in SETTINGS[:3]}, "seed": seed, "learning_rate": rate}
        if scores.get("settings") != json.dumps(settings):
            about = {"machine": machine, "settings": settings, "learning_rates": rates}
            scores = {key: json.dumps(value) for key, value in about.items()}
        if idea is None:
            lab.reset(Format())
            took = {"seconds": 0.0}
        else:
            took = lab.tune(idea, blocks, arguments.steps, arguments.batch, seed, both if questions else answers)
        scores[f"{name}|seconds"] = took["seconds"]
        precisions = [None if width == "full" else Precision(width) for width in widths]
        found = lab.perplexity(held.flatten(), precisions, arguments.length, 64, aims.flatten())
        print(name, {width: round(value, 3) for width, value in found.items()}, flush=True)
        for width, precision in zip(widths, precisions, strict=True):
            started = time.perf_counter()
            scores[f"{name}|{width}|perplexity"] = found[width]
            if arguments.perplexity_only:
                continue
            lab.use(precision, lab.measured, Format())
            likelihoods, greedy = score(
                lab.model, requests, prepared=prepared, autocast=lab.half, hidden=partial(lab.hidden, any_shape=True)
            )
            scores[f"{name}|{width}|likelihoods"], scores[f"{name}|{width}|greedy"] = likelihoods, greedy
            seconds = time.perf_counter() - started
            print(name, width, f"{took['seconds']:.1f} + {seconds:.1f} s", float(likelihoods.mean()), flush=True)
        out = Path(arguments.out.format(seed=seed))
        unfinished = out.with_suffix(".partial.npz")
        np.savez_compressed(unfinished, **scores)
        unfinished.replace(out)


def report(arguments: argparse.Namespace) -> None:
    result: dict[str, Any] = {"files": [], "runs": {}}
    read = [json.loads(Path(file).read_text(encoding="utf-8")) for file in arguments.earlier or ()]
    tuned = [about["settings"] for earlier in read for about in earlier["files"]]
    tuned += [json.loads(str(np.load(file)["settings"])) for file in arguments.scores or ()]
    # What was measured before tuning has no learning rate.
    shared = {json.dumps({**each, "seed": None}, sort_keys=True) for each in tuned if "learning_rate" in each}
    if len(shared) != 1:
        raise SystemExit(f"runs of other settings cannot be compared: {'; '.join(sorted(shared)) or 'there are none'}")
    if arguments.scores:
        from zero_shot_score import metrics

        from otaro.evaluate.tasks import load_tasks

        requests = dict(np.load(arguments.requests))
        tasks = load_tasks(requests["names"].tolist(), arguments.tasks_from)
    for file in arguments.scores or ():
        scores = np.load(file)
        about = {name: json.loads(str(scores[name])) for name in ("machine", "settings", "learning_rates")}
        about["settings"] = {name: about["settings"][name] for name in SETTINGS if name in about["settings"]}
        result["files"].append(about)
        for key in scores.files:
            if not key.endswith("|perplexity"):
                continue
            name, width, _ = key.split("|")
            seed = None if name == "before tuning" else about["settings"]["seed"]
            about_run = {"seed": seed, "commit": about["machine"]["commit"]}
            figures: dict[str, Any] = {**about_run, "perplexity": float(scores[key])}
            scored = f"{name}|{width}|likelihoods"
            if scored in scores.files:
                greedy = scores[scored.replace("likelihoods", "greedy")]
                figures |= metrics(tasks, requests, scores[scored], greedy)
                figures["boolq"] |= inclination(tasks["boolq"], requests, scores[scored])
            # The paper's row of fixed precision takes each width from the run made for it.
            add(result, re.sub(":E5M.", "", name), width, figures)
    for earlier in read:
        result["files"] += [about for about in earlier["files"] if about not in result["files"]]
        for name, row in earlier["runs"].items():
            for width, found in row.items():
                for figures in found:
                    add(result, name, width, figures)
    result["differences"] = {
        f"{name} - {other}{note}": {
            width: found
            for width in NAMES
            if (
                found := difference(result["runs"], width, name, other, [task for task in TASKS if task not in without])
            )
        }
        for note, without in (("", ()), (", without BoolQ", ("boolq",)))
        for name, other in COMPARED
        if name in result["runs"] and other in result["runs"]
    }
    show(result)
    if arguments.json:
        common.write_json(Path(arguments.json), result)
    if arguments.plot:
        plot(result, Path(arguments.plot))


def inclination(task: Any, requests: dict[str, np.ndarray], likelihoods: np.ndarray) -> dict[str, float]:
    """How often yes is said to BoolQ's questions, and the accuracy if as many of them were to be answered no as yes."""
    own = requests["task"] == requests["names"].tolist().index("boolq")
    limit = int(requests["limit"])
    right = np.array([doc["label"] for doc in itertools.islice(task.eval_docs, None if limit < 0 else limit)])
    yes = likelihoods[own].reshape(-1, 2).argmax(1)
    return {"says_yes": float(yes.mean()), "balanced": float(np.mean([(yes[right == k] == k).mean() for k in (0, 1)]))}


def add(result: dict[str, Any], name: str, width: str, figures: dict[str, Any]) -> None:
    """Keep the figures of a run at a width, unless those of the same seed are there."""
    rows = result["runs"].setdefault(name, {}).setdefault(width, [])
    if figures["seed"] not in [row["seed"] for row in rows]:
        rows.append(figures)
        rows.sort(key=lambda row: row["seed"] or 0)


def difference(runs: dict[str, Any], width: str, name: str, other: str, tasks: Sequence[str]) -> dict[str, Any] | None:
    """By how much the average accuracy over tasks differs, and the standard error of that over seeds.

    Only seeds that both have are compared: a seed is an order of the data, which moves all runs the same way.
    """
    by_seed = [
        {
            row["seed"]: float(np.mean([row[task]["acc"] for task in tasks]))
            for row in runs[each].get(width, ())
            if "average" in row
        }
        for each in (name, other)
    ]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if not seeds:
        return None
    apart = np.array([by_seed[0][seed] - by_seed[1][seed] for seed in seeds])
    error = float(apart.std(ddof=1) / np.sqrt(len(apart))) if len(apart) > 1 else None
    return {"mean": float(apart.mean()), "stderr": error, "seeds": seeds}


def mean(rows: list[dict[str, Any]], *names: str) -> float:
    """The mean over seeds of a figure."""
    found = rows
    for name in names:
        found = [row[name] for row in found]
    return float(np.mean(found))


def having(needed: str, row: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Of the seeds at each width those with a figure, which one that was measured in perplexity only has not."""
    found = {width: [figures for figures in seeds if needed in figures] for width, seeds in row.items()}
    return {width: seeds for width, seeds in found.items() if seeds}


def signed(found: dict[str, Any]) -> str:
    """A difference in points, with its standard error where there are several seeds."""
    error = "" if found["stderr"] is None else f" ± {100 * found['stderr']:.2f}"
    return f"{100 * found['mean']:+.2f}{error}"


def show(result: dict[str, Any]) -> None:
    tables: list[tuple[str, str, Callable[[list[dict[str, Any]]], str]]] = [
        ("average accuracy, %", "average", lambda rows: f"{100 * mean(rows, 'average', 'acc'):.2f}"),
        ("perplexity of held-back answers", "perplexity", lambda rows: f"{mean(rows, 'perplexity'):.3f}"),
    ]
    for title, needed, cell in tables:
        print(f"\n| {title} | {' | '.join(NAMES)} |")
        print("|---" * (len(NAMES) + 1) + "|")
        for name in (name for name in ROWS if name in result["runs"]):
            row = having(needed, result["runs"][name])
            cells = [cell(row[width]) if width in row else "" for width in NAMES]
            counts = sorted({len(found) for found in row.values()})
            spans = " to ".join(dict.fromkeys(str(each) for each in (*counts[:1], *counts[-1:])))
            seeds = f", mean of {spans}" if counts[-1:] > [1] else ""
            print(f"| {name}{seeds} | {' | '.join(cells)} |")
        if needed == "average":
            for name, row in result["differences"].items():
                cells = [signed(row[width]) if width in row else "" for width in NAMES]
                print(f"| {name} | {' | '.join(cells)} |")


def plot(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    colors: dict[str, Any] = {}
    for name in (name for name in ROWS if name in result["runs"]):
        row = having("average", result["runs"][name])
        widths = [width for width in NAMES if width in row]
        found = [[100 * figures["average"]["acc"] for figures in row[width]] for width in widths]
        errors = [np.std(each, ddof=1) / np.sqrt(len(each)) if len(each) > 1 else 0.0 for each in found]
        kind, dashed = name.partition(",")[0], "," in name
        line = axes.errorbar(
            *(widths, [np.mean(each) for each in found], errors),
            marker="o",
            linestyle="--" if dashed else "-",
            color=colors.get(kind),
            alpha=0.5 if dashed else 1.0,
            label=f"{name}, {len(found[0])} seeds" if len(found[0]) > 1 else name,
        )
        colors[kind] = line[0].get_color()
    axes.set_xlabel("precision")
    axes.set_ylabel("average accuracy on eight tasks, %")
    axes.legend(loc="lower left", fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("prepare", "run", "report"))
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file or a Hugging Face folder")
    parser.add_argument("--alpaca", help="alpaca_data.json for prepare, its blocks for run")
    parser.add_argument("--requests", help="the tasks' requests, from zero_shot_requests.py")
    parser.add_argument("--scores", nargs="+", help="what run wrote, a file for every seed")
    parser.add_argument("--earlier", nargs="+", help="what report wrote before, for runs whose scores are not at hand")
    parser.add_argument("--tasks-from", default="hub", help="where the documents come from, as in otaro eval")
    parser.add_argument("--out", help="where prepare and run write, {seed} in it being the seed")
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("--plot", help="draw them there")
    parser.add_argument("--only", help="these runs only, with semicolons between")
    parser.add_argument("--perplexity-only", action="store_true", help="leave the tasks out")
    parser.add_argument(
        "--learning-rates", default="1e-4,2e-4,3e-4", help="the best for fp16 on held-back answers is taken"
    )
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", default="0", help="with commas between; run writes a file for each")
    parser.add_argument("--quick", action="store_true", help="two small updates and twenty requests, for a look")
    arguments = parser.parse_args()
    if arguments.stage == "run" and "," in arguments.seeds and "{seed}" not in arguments.out:
        parser.error("several seeds need a {seed} in --out")
    {"prepare": prepare, "run": run, "report": report}[arguments.stage](arguments)


if __name__ == "__main__":
    main()
