"""Tune on WikiText-2 with every method and measure each tuned model at every width (Figs. 3, 7 and 8).

    python experiments/wikitext_tuning.py --train wiki.train.tokens --test wiki.test.tokens --json FILE --seeds 0,1,2
    python experiments/wikitext_tuning.py --train wiki.train.tokens --test wiki.test.tokens --quick      # on a CPU
    python experiments/wikitext_tuning.py --show FILE … [--plot FILE.png]     # results of several calls together

All runs of a seed see the same blocks in the same order and take the same number of batches; those that are random
themselves (uniform) draw from the seed too. `--runs` chooses a group: `methods` (Fig. 7; Fig. 3 is part of it),
`fixed` (every width alone), `averaged` (the recipe's schedule and mean of the weights for runs of one width, and the
recipe without them), `earlier` (forms that the recipe had), `ablation` (Fig. 8), `data` (LAA with less data) or
`floors` (of embeddings and head). The loop is `lab.py`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import common
import tables
import torch
from lab import Idea, Lab, add_arguments
from recipe_search import EARLIER, THRICE, TO_NOTHING, UNIFORM, chosen, drawn, fixed, searched

from otaro.precision import Precision
from otaro.sefp import Format

M8, M7, M6, M5, M4, M3 = Precision
FORMAT = Format()

GROUPS = ("methods", "fixed", "averaged", "earlier", "ablation", "data", "floors")


def runs(group: str, rate: float, seed: int) -> dict[str, Idea]:
    """The runs of a group by name; made anew for every seed, because plans remember what they drew."""

    def bps(exploration: float = 5.0, **options: Any) -> Idea:
        return Idea(searched(exploration), rate, format=FORMAT, needs_losses=True, **options)

    groups: dict[str, dict[str, Idea]] = {
        "methods": {
            "fp16": Idea(fixed(None), rate, format=FORMAT),
            "fixed:E5M3": Idea(fixed(M3), rate, format=FORMAT),
            "fixed:E5M4": Idea(fixed(M4), rate, format=FORMAT),
            "tiers": chosen(rate),
            "uniform": Idea(drawn(UNIFORM, seed), rate, format=FORMAT),
            "bps": bps(),
            "otaro, sum": bps(delay=10, delay_apply="sum"),
            "otaro, mean": bps(delay=10, delay_apply="mean"),
            "paper": Idea(
                searched(5.0),
                1e-5,
                format=Format("nearest"),
                needs_losses=True,
                delay=10,
                delay_apply="sum",
                sgd=True,
                schedule="constant",
                warm_up=0.0,
                clip=0.0,
            ),
        },
        "fixed": {f"fixed:{width}": Idea(fixed(width), rate, format=FORMAT) for width in Precision},
        # What the recipe's schedule and its mean of the weights do for the others, and the recipe without them.
        "averaged": {
            **{
                f"{name}, averaged": Idea(fixed(width), rate, format=FORMAT, final=0.3, average=0.4)
                for name, width in {"fp16": None, "fixed:E5M3": M3, "fixed:E5M4": M4}.items()
            },
            "tiers, not averaged": chosen(rate, **TO_NOTHING),
        },
        "earlier": {
            "earlier tiers, E5M3's tier at rest": chosen(rate, **THRICE, at_rest=(M3,)),
            "earlier tiers, all averaged": chosen(rate, **THRICE, at_rest=()),
            "earlier tiers, not averaged": chosen(rate, **EARLIER),
        },
        "ablation": {
            **{f"bps, λ {exploration}": bps(exploration) for exploration in (3.0, 4.0, 5.0, 6.0, 7.0)},
            **{f"otaro, N {n}": bps(delay=n, delay_apply="sum") for n in (5, 10, 20)},
        },
        # One pass over that much data: does LAA help where there is little of it?
        "data": {
            f"{name}, {steps} updates": bps(steps=steps, **options)
            for steps in (25, 50, 100, 200)
            for name, options in {"bps": {}, "otaro": {"delay": 10, "delay_apply": "sum"}}.items()
        },
        # Embeddings and head never below a width, in the run made for E5M3.
        "floors": {f"floor {floor}": Idea(fixed(M3), rate, format=FORMAT, floor=floor) for floor in (M3, M4, M5, M8)},
    }
    return groups[group]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = torch.from_numpy(common.tokens_of(Path(arguments.train), arguments.model)).long().to(device)
    test = torch.from_numpy(common.tokens_of(Path(arguments.test), arguments.model)).long().to(device)
    window = arguments.window
    if arguments.quick:
        arguments.steps, arguments.batch, arguments.length, window = 4, 2, 128, 256
        test = test[: 2 * window]
    blocks = train[: len(train) // arguments.length * arguments.length].view(-1, arguments.length)
    settings = {
        name: getattr(arguments, name)
        for name in ("steps", "batch", "length", "window", "seeds", "runs", "learning_rate")
    }
    result: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "settings": {**settings, "format": str(FORMAT), "test_tokens": len(test)},
        "machine": common.machine(),
        "runs": {},
    }
    lab = Lab(arguments.model, device, compiled=device.type == "cuda")
    widths = [*Precision, None]

    def keep(name: str, row: dict[str, Any]) -> None:
        result["runs"].setdefault(name, []).append(row)
        print(name, {width: round(value, 3) for width, value in row["perplexity"].items()}, flush=True)
        if arguments.json:
            common.write_json(Path(arguments.json), result)

    keep("before tuning", {"perplexity": lab.perplexity(test, widths, FORMAT, window)})
    for seed in map(int, arguments.seeds.split(",")):
        for name, idea in runs(arguments.runs, arguments.learning_rate, seed).items():
            if arguments.only and name not in arguments.only.split(";"):
                continue
            row = {
                "seed": seed,
                **lab.tune(idea, blocks, min(idea.steps or arguments.steps, arguments.steps), arguments.batch, seed),
            }
            keep(name, {**row, "perplexity": lab.perplexity(test, widths, idea.format, window)})
    return result


def show(result: dict[str, Any]) -> None:
    seconds = {
        name: [row["step_seconds"] for row in rows if "step_seconds" in row] for name, rows in result["runs"].items()
    }
    took = {name: f"{1e3 * statistics.median(found):.1f}" for name, found in seconds.items() if found}
    tables.show(result, ms_an_update=took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, steps=400)
    parser.add_argument("--test", help="WikiText-2's wiki.test.tokens, or its token ids as .npy")
    parser.add_argument("--runs", choices=GROUPS, default="methods")
    parser.add_argument("--only", help="these runs of the group only, with ; between")
    parser.add_argument("--seeds", default="0", help="with commas between")
    parser.add_argument("--quick", action="store_true", help="four small updates each, for a look")
    parser.add_argument("--show", nargs="+", help="print the table of earlier runs and stop")
    arguments = parser.parse_args()
    if arguments.show:
        result = tables.together(arguments.show)
    elif arguments.train and arguments.test:
        result = run(arguments)
    else:
        parser.error("--train and --test, or --show, are needed")
    show(result)
    if arguments.plot:
        # The two left out are so far off that they would flatten the rest; the table has them.
        tables.draw(result, Path(arguments.plot), arguments.title or result["model"], ("before tuning", "paper"))


if __name__ == "__main__":
    main()
