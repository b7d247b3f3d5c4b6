"""Trying ideas for the recipe: one row each, on WikiText-2's validation split.

    python experiments/recipe_search.py --train train.npy --valid valid.npy --json FILE [--round 8] [--only text]
    python experiments/recipe_search.py --train wiki.train.tokens --valid wiki.valid.tokens --quick     # on a CPU

Every row is 200 or 400 updates of 16 x 512 tokens of SmolLM2-135M (whose weights come from a 4-bit file), one seed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import torch
from lab import Idea, Lab, Pass

from otaro.precision import Precision
from otaro.sefp import Format
from otaro.tune.average import FINAL
from otaro.tune.path import BitWidthPathSearch

M8, M7, M6, M5, M4, M3 = Precision
FIRST, SECOND = slice(0, None, 2), slice(1, None, 2)


def fixed(width: Precision | None) -> Any:
    return lambda number, steps, losses: [Pass(width)]


def drawn(weights: dict[Precision, float], seed: int = 0) -> Any:
    """One width an update, drawn with these weights."""
    generator = random.Random(seed)

    def plan(number: int, steps: int, losses: Any) -> Sequence[Pass]:
        return [Pass(generator.choices(list(weights), list(weights.values()))[0])]

    return plan


def ramped() -> Any:
    """One width an update; E5M4 and E5M3 are drawn more and more often."""
    generator = random.Random(0)

    def plan(number: int, steps: int, losses: Any) -> Sequence[Pass]:
        low = 0.4 + 0.5 * number / steps
        return [Pass(generator.choices([M6, M4, M3], [1 - low, 0.45 * low, 0.55 * low])[0])]

    return plan


def searched(exploration: float) -> Any:
    path = BitWidthPathSearch(Precision, exploration)

    def plan(number: int, steps: int, losses: dict[Precision | None, float]) -> Sequence[Pass]:
        if number:
            path.record(plan.last, losses[plan.last])  # type: ignore[attr-defined]
        plan.last = path.choose()  # type: ignore[attr-defined]
        return [Pass(plan.last)]  # type: ignore[attr-defined]

    return plan


def pair(high: Any, weights: dict[Precision, float], *, teacher: float, weight: float = 1.0, seed: int = 0) -> Any:
    """A high width on the labels, and a drawn low one on labels and the high one's own predictions."""
    generator = random.Random(seed)

    def plan(number: int, steps: int, losses: Any) -> Sequence[Pass]:
        low = generator.choices(list(weights), list(weights.values()))[0]
        return [Pass(high), Pass(low, weight=weight, labels=1 - teacher, teacher=teacher)]

    return plan


def split(high: Any = M8, *, teacher: float = 1.0, weight: float = 0.5) -> Any:
    """A high width on the whole batch, E5M4 and E5M3 on a half each, changing places."""

    def plan(number: int, steps: int, losses: Any) -> Sequence[Pass]:
        halves = (FIRST, SECOND) if number % 2 else (SECOND, FIRST)
        low = [
            Pass(width, weight=weight, labels=1 - teacher, teacher=teacher, part=part)
            for width, part in zip((M4, M3), halves, strict=True)
        ]
        return [Pass(high), *low]

    return plan


def shares(high: int, middle: int, low: int, *, teacher: float = 0.5) -> Any:
    """E5M8 on the first `high` blocks of a batch, E5M4 on the last `middle` of these and E5M3 on the first `low`."""

    def plan(number: int, steps: int, losses: Any) -> Sequence[Pass]:
        halves = (
            (slice(high - middle, high), slice(0, low)) if number % 2 else (slice(0, middle), slice(high - low, high))
        )
        taught = [
            Pass(width, weight=0.5, labels=1 - teacher, teacher=teacher, part=part)
            for width, part in zip((M4, M3), halves, strict=True)
        ]
        return [Pass(M8, part=slice(0, high)), *taught]

    return plan


def turns(
    high: Sequence[Precision] = (M8,),
    low: Sequence[Precision] = (M4, M3),
    *,
    teacher: float = 0.5,
    blocks: int | None = None,
    weight: float = 1.0,
    rested: float = 1.0,
) -> Any:
    """A high width, in turns, and in turns the low ones, on the whole batch or on its first blocks.

    After the share `rested` of the updates E5M3's turns are left out.
    """

    def plan(number: int, steps: int, losses: Any) -> Sequence[Pass]:
        part = slice(0, blocks)
        width = low[number % len(low)]
        wide = Pass(high[number % len(high)])
        if width == M3 and number >= rested * steps:
            return [wide]
        return [wide, Pass(width, weight=weight, labels=1 - teacher, teacher=teacher, part=part)]

    return plan


def together(blocks: int, *, teacher: float = 0.75, high: Sequence[Precision] = (M8,)) -> Any:
    """A high width, in turns, on the whole batch, E5M4 and E5M3 on a half each of its first blocks.

    When these rows were run, both were computed in one pass over stacked weights, which was no faster.
    """
    parts = {M4: slice(0, blocks // 2), M3: slice(blocks // 2, blocks)}
    low = [Pass(width, weight=0.5, labels=1 - teacher, teacher=teacher, part=part) for width, part in parts.items()]
    return lambda number, steps, losses: [Pass(high[number % len(high)]), *low]


def fading(start: float, first: Any, then: Any) -> Any:
    """One plan up to a share of the updates, then another."""
    return lambda number, steps, losses: (first if number < start * steps else then)(number, steps, losses)


def after(start: float, plan: Any) -> Any:
    """E5M8 alone for a share of the updates, then a plan."""

    def both(number: int, steps: int, losses: Any) -> Sequence[Pass]:
        found: Sequence[Pass] = [Pass(M8)] if number < start * steps else plan(number, steps, losses)
        return found

    return both


LOW = {M5: 0.1, M4: 0.35, M3: 0.55}
TIERS = (M3, M4)
MIXED = ((M8, M4, 0.5), (M8, M3, 0.15))
SHARES = ((M4, 0.5), (M3, 0.15))
FASTER = ((M4, 1.4), (M3, 1.4))
TWICE = (M4, M3, M4)
BOTH = (M8, M8, M5, M5)  # with E5M4 and E5M3 in turns every pair of them
ALL = (M3, "floored", "norms")  # that E5M3 computes with
UNIFORM = dict.fromkeys(Precision, 1.0)
# The second half of earlier forms of the recipe: three turns of four for E5M4, on 12 blocks.
THRICE: dict[str, Any] = {"later": (M4, M4, M4, M3), "blocks": 12}
# The learning rate falls to nothing, the last weights are the result.
TO_NOTHING: dict[str, Any] = {"final": 0.0, "average": 0.0}
EARLIER = {**THRICE, **TO_NOTHING}


def tiers(plan: Any = None, learning_rate: float = 3e-4, **options: Any) -> Idea:
    return Idea(plan or split(teacher=0.5), learning_rate, tiers=TIERS, **options)


def released(plan: Any, **options: Any) -> Idea:
    return tiers(plan, released=True, mixed=MIXED, **options)


def chosen(
    learning_rate: float = 3e-4,
    high: Sequence[Precision] = (M8, M8, M5),
    early: Sequence[Precision] | None = None,
    blocks: int = 11,
    later: Sequence[Precision] = (M4, M3),
    rested: float = 1.0,
    **options: Any,
) -> Idea:
    """What came out of the rounds: `--recipe default`, in batches of 16."""
    first = turns(early or high, teacher=0.75)
    then = turns(high, later, teacher=0.75, blocks=blocks, rested=rested)
    options = {
        "by_agreement": "shares" not in options,
        "tier_rates": ((M3, 1.4),),
        "final": FINAL,
        "average": 0.4,
        "at_rest": ALL,
        **options,
    }
    return tiers(fading(0.5, first, then), learning_rate, **options)


def ideas(only: str) -> dict[str, Idea]:
    """The rows of a round, by name; made anew for every run, because plans remember what they drew."""
    rounds: dict[str, dict[str, Idea]] = {
        "1": {
            "fp16 3e-5": Idea(fixed(None)),
            "fp16 1e-4": Idea(fixed(None), 1e-4),
            "fp16 2e-4": Idea(fixed(None), 2e-4),
            "fixed M3 1e-4": Idea(fixed(M3), 1e-4),
            "fixed M3 3e-4": Idea(fixed(M3), 3e-4),
            "fixed M4 1e-4": Idea(fixed(M4), 1e-4),
            "uniform 1e-4": Idea(drawn(UNIFORM), 1e-4),
            "single M6 30 M4 30 M3 40, 1e-4": Idea(drawn({M6: 0.3, M4: 0.3, M3: 0.4}), 1e-4),
            "pair, half teacher, 3e-5": Idea(pair(M8, LOW, teacher=0.5)),
            "pair, labels, 1e-4": Idea(pair(M8, LOW, teacher=0.0), 1e-4),
            "pair, half teacher, 1e-4": Idea(pair(M8, LOW, teacher=0.5), 1e-4),
            "pair, teacher, 1e-4": Idea(pair(M8, LOW, teacher=1.0), 1e-4),
            "pair, teacher, 2e-4": Idea(pair(M8, LOW, teacher=1.0), 2e-4),
            "pair, teacher, weight 2, 1e-4": Idea(pair(M8, LOW, teacher=1.0, weight=2.0), 1e-4),
            "pair, teacher, normalised, 1e-4": Idea(pair(M8, LOW, teacher=1.0), 1e-4, normalise=True),
            "split, teacher, 1e-4": Idea(split(M8, teacher=1.0), 1e-4),
        },
        # 200 updates.
        "2": {
            "fp16 3e-4": Idea(fixed(None), 3e-4),
            "fixed M3 3e-4": Idea(fixed(M3), 3e-4),
            "fixed M4 3e-4": Idea(fixed(M4), 3e-4),
            "split, teacher, 3e-4": Idea(split(), 3e-4),
            "split, labels, 3e-4": Idea(split(teacher=0.0), 3e-4),
            "split, half teacher, 3e-4": Idea(split(teacher=0.5), 3e-4),
            "pair, teacher, 3e-4": Idea(pair(M8, LOW, teacher=1.0), 3e-4),
            "single M6 30 M4 30 M3 40, 3e-4": Idea(drawn({M6: 0.3, M4: 0.3, M3: 0.4}), 3e-4),
            "single ramped, 3e-4": Idea(ramped(), 3e-4),
        },
        "3": {
            "pair, half teacher": Idea(pair(M8, LOW, teacher=0.5), 3e-4),
            "one by one, half teacher": Idea(pair(M8, LOW, teacher=0.5), 3e-4, one_by_one=True),
            "one by one, labels": Idea(pair(M8, LOW, teacher=0.0), 3e-4, one_by_one=True),
            "normalised": Idea(pair(M8, LOW, teacher=0.5), 3e-4, normalise=True),
            "betas 0.9 0.95": Idea(pair(M8, LOW, teacher=0.5), 3e-4, betas=(0.9, 0.95)),
            "weight 2": Idea(pair(M8, LOW, teacher=0.5, weight=2.0), 3e-4),
            "average of the last 0.3": Idea(pair(M8, LOW, teacher=0.5), 3e-4, average=0.3),
            "6e-4, fp16": Idea(fixed(None), 6e-4),
            "6e-4, fixed M3": Idea(fixed(M3), 6e-4),
            "6e-4, fixed M4": Idea(fixed(M4), 6e-4),
            "6e-4, pair, half teacher": Idea(pair(M8, LOW, teacher=0.5), 6e-4),
            "group 32": Idea(pair(M8, LOW, teacher=0.5), 3e-4, format=Format("nested", 32)),
            "M6 as the high width": Idea(pair(M6, LOW, teacher=0.5), 3e-4),
        },
        "4": {
            "tiers, teacher": Idea(split(), 3e-4, tiers=TIERS),
            "fp16": Idea(fixed(None), 3e-4),
            "tiers, half teacher": Idea(split(teacher=0.5), 3e-4, tiers=TIERS),
            "tiers, pair": Idea(pair(M8, {M4: 0.5, M3: 0.5}, teacher=1.0), 3e-4, tiers=TIERS),
            "tiers, teacher, 2e-4": Idea(split(), 2e-4, tiers=TIERS),
        },
        # 200 updates.
        "5": {
            "tiers": tiers(),
            "tiers, labels": tiers(split(teacher=0.0)),
            "tiers, quarter teacher": tiers(split(teacher=0.25)),
            "tiers, released": tiers(released=True),
            "tiers, M8 to M4 0.1, M4 to M3 0.3": tiers(mixed=((M8, M4, 0.1), (M4, M3, 0.3))),
            "tiers, M8 to M4 0.3, M8 to M3 0.1": tiers(mixed=((M8, M4, 0.3), (M8, M3, 0.1))),
            "tiers, M4 to M3 0.3, M3 to M4 0.3": tiers(mixed=((M4, M3, 0.3), (M3, M4, 0.3))),
            "tiers, in turns": tiers(turns()),
            "tiers, teacher, weight 2, M8 to both 0.3": tiers(
                split(teacher=1.0, weight=2.0), mixed=((M8, M4, 0.3), (M8, M3, 0.3))
            ),
            "tiers, 4e-4": tiers(learning_rate=4e-4),
            "tiers, average of the last 0.3": tiers(average=0.3),
        },
        "6": {
            "tiers, released, M8 to M4 0.6, M8 to M3 0.2": tiers(released=True, mixed=((M8, M4, 0.6), (M8, M3, 0.2))),
            "tiers, M8 to M4 1, M8 to M3 0.4": tiers(mixed=((M8, M4, 1.0), (M8, M3, 0.4))),
            "tiers, M8 to M4 0.3, M8 to M3 0.1, M4 to M3 0.3, M3 to M4 0.2": tiers(
                mixed=((M8, M4, 0.3), (M8, M3, 0.1), (M4, M3, 0.3), (M3, M4, 0.2))
            ),
            "tiers, released, M8 to M4 0.6, M8 to M3 0.2, M4 to M3 0.3, M3 to M4 0.2": tiers(
                released=True, mixed=((M8, M4, 0.6), (M8, M3, 0.2), (M4, M3, 0.3), (M3, M4, 0.2))
            ),
            "tiers, M8 to M4 0.6, M8 to M3 0.2, M4 to M8 0.3": tiers(
                mixed=((M8, M4, 0.6), (M8, M3, 0.2), (M4, M8, 0.3))
            ),
        },
        "7": {
            "tiers, released, carried M4 0.5 M3 0.25": tiers(released=True, carried=((M4, 0.5), (M3, 0.25))),
            "tiers, released, carried M4 1 M3 0.5": tiers(released=True, carried=((M4, 1.0), (M3, 0.5))),
            "best": tiers(released=True, mixed=MIXED),
            "best, 3/4 teacher": tiers(split(teacher=0.75), released=True, mixed=MIXED),
            "best, 9 and 7": tiers(shares(16, 9, 7), released=True, mixed=MIXED),
            "best, 12, 9 and 7": tiers(shares(12, 9, 7), released=True, mixed=MIXED),
            "best, average of the last 0.3": tiers(released=True, mixed=MIXED, average=0.3),
            "best, 2e-4": tiers(learning_rate=2e-4, released=True, mixed=MIXED),
        },
        # 400 updates, and cheaper.
        "8": {
            "best, 3/4 teacher, not released": tiers(split(teacher=0.75), mixed=MIXED),
            "best, 3/4 teacher": tiers(split(teacher=0.75), released=True, mixed=MIXED),
            "3/4 teacher, in turns on 12": tiers(turns(teacher=0.75, blocks=12), mixed=MIXED),
            "3/4 teacher, 12, 6 and 6": tiers(shares(12, 6, 6, teacher=0.75), mixed=MIXED),
            "3/4 teacher, in turns on 14": tiers(turns(teacher=0.75, blocks=14), mixed=MIXED),
            "3/4 teacher, 14, 6 and 6": tiers(shares(14, 6, 6, teacher=0.75), mixed=MIXED),
            "bps": Idea(searched(5.0), 3e-4, needs_losses=True),
            "otaro, sum": Idea(searched(5.0), 3e-4, needs_losses=True, delay=10, delay_apply="sum"),
            "otaro, mean": Idea(searched(5.0), 3e-4, needs_losses=True, delay=10, delay_apply="mean"),
        },
        "10": {
            "together on 16": tiers(together(16), shares=SHARES),
            "together on 16, then on 8": tiers(fading(0.5, together(16), together(8)), shares=SHARES),
            "together on 14, E5M5 as the high width": tiers(together(14, high=(M5,)), shares=SHARES),
            "together on 14, tiers' rate 0.7": tiers(together(14), shares=SHARES, tier_rates=((M4, 0.7), (M3, 0.7))),
        },
        # 400 updates; updates do not wait for each other any more.
        "11": {
            "fp16": Idea(fixed(None), 3e-4),
            "in turns, reused, E5M8 and E5M5": tiers(turns(BOTH, teacher=0.75, weight=0.5), shares=SHARES, reused=True),
            "in turns, tiers' rate 1.4, E5M8 and E5M5": tiers(
                turns(BOTH, teacher=0.75), shares=SHARES, tier_rates=FASTER
            ),
            "in turns, tiers' rate 1.4": tiers(turns(teacher=0.75), shares=SHARES, tier_rates=FASTER),
            "in turns on 16, then on 8, tiers' rate 1.4, E5M8 and E5M5": tiers(
                fading(0.6, turns(BOTH, teacher=0.75), turns(BOTH, teacher=0.75, blocks=8)),
                shares=SHARES,
                tier_rates=FASTER,
            ),
        },
        "12": {
            "E5M4 twice, E5M3's rate 1.4": tiers(
                turns(low=TWICE, teacher=0.75), shares=SHARES, tier_rates=((M3, 1.4),)
            ),
            "E5M4 twice, tiers' rate 1.4": tiers(turns(low=TWICE, teacher=0.75), shares=SHARES, tier_rates=FASTER),
            "in turns, then E5M4 thrice, E5M3's rate 1.4": tiers(
                fading(0.5, turns(teacher=0.75), turns(low=(M4, M4, M4, M3), teacher=0.75)),
                shares=SHARES,
                tier_rates=((M3, 1.4),),
            ),
            "E5M4 twice, E5M3's rate 1.4, all of E5M8's gradient to E5M4": tiers(
                turns(low=TWICE, teacher=0.75), shares=((M4, 1.0), (M3, 0.15)), tier_rates=((M3, 1.4),)
            ),
            "E5M4 twice, E5M3's rate 1.4, teacher": tiers(
                turns(low=TWICE, teacher=1.0), shares=SHARES, tier_rates=((M3, 1.4),)
            ),
        },
        "13": {
            "chosen, shares by agreement": chosen(high=(M8,), **EARLIER),
            "chosen, shares by agreement, E5M8 twice, E5M5": chosen(**EARLIER),
            "chosen, shares 2 and 1": chosen(high=(M8,), shares=((M4, 2.0), (M3, 1.0)), **EARLIER),
        },
        "14": {
            "E5M8 twice, E5M5, then on 10": chosen(**{**EARLIER, "blocks": 10}),
            "E5M8, E5M6, E5M5, then on 10": chosen(high=(M8, M6, M5), **{**EARLIER, "blocks": 10}),
        },
        "15": {
            "chosen": chosen(**EARLIER),
            "E5M5 in the second half": chosen(early=(M8,), **EARLIER),
            "E5M5 every other time in the second half": chosen(early=(M8,), high=(M8, M5), **EARLIER),
        },
        "16": {
            "constant rate, average of the last half": chosen(**THRICE, schedule="constant", average=0.5, at_rest=()),
            "rate down to 0.3, average of the last 0.4": chosen(**THRICE, final=0.3, average=0.4, at_rest=()),
        },
        "17": {
            "down to 0.15, average of the last 0.4": chosen(**THRICE, final=0.15, average=0.4, at_rest=()),
            "down to 0.3, average of the last 0.6": chosen(**THRICE, final=0.3, average=0.6, at_rest=()),
            "without E5M5, down to 0.3, average of the last 0.4": chosen(
                **THRICE, high=(M8,), final=0.3, average=0.4, at_rest=()
            ),
            "tiers rest without a turn, down to 0.3, average of the last 0.4": chosen(
                **THRICE, resting=True, final=0.3, average=0.4, at_rest=()
            ),
        },
        "18": {
            "E5M3 comes to rest": chosen(**THRICE, at_rest=(M3,)),
            "E5M4 and E5M3 come to rest": chosen(**THRICE, at_rest=(M4, M3)),
            "E5M3 comes to rest, the others down to 0.5, average of the last half": chosen(
                **THRICE, final=0.5, average=0.5, at_rest=(M3,)
            ),
        },
        "19": {
            "in turns to the end": chosen(blocks=12, at_rest=(M3,)),
            "in turns to the end, what E5M3 computes with comes to rest": chosen(blocks=12, at_rest=ALL[:2]),
            "the same, on 10": chosen(blocks=10, at_rest=ALL[:2]),
            "E5M3 comes to rest": chosen(**THRICE, at_rest=(M3,)),
        },
        "20": {
            "chosen": chosen(),
            "norms averaged": chosen(at_rest=ALL[:2]),
            "without E5M3's last turns": chosen(rested=0.85),
        },
        # 400 updates; the low widths later, and on more blocks then.
        "9": {
            "later 0.4, 10 and 10": released(after(0.4, shares(16, 10, 10, teacher=0.75))),
            "later 0.5, 12 and 12": released(after(0.5, shares(16, 12, 12, teacher=0.75))),
            "later 0.3, 8 and 8": released(after(0.3, split(teacher=0.75))),
            "E5M5 as the high width": tiers(split(M5, teacher=0.75), released=True, mixed=MIXED),
        },
    }
    return rounds[only]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = torch.from_numpy(common.tokens_of(Path(arguments.train), arguments.model)).long().to(device)
    valid = torch.from_numpy(common.tokens_of(Path(arguments.valid), arguments.model)).long().to(device)
    window = arguments.window
    valid = valid[: arguments.windows * window]
    if arguments.quick:
        arguments.steps, arguments.batch, arguments.length, window = 2, 2, 128, 256
        valid = valid[:window]
    blocks = train[: len(train) // arguments.length * arguments.length].view(-1, arguments.length)
    names = ("steps", "batch", "length", "window", "windows", "seed", "round", "learning_rate")
    settings = {name: getattr(arguments, name) for name in names}
    result: dict[str, Any] = {"settings": settings, "machine": common.machine(), "rows": {}}
    lab = Lab(arguments.model, device, compiled=device.type == "cuda")
    share, shares = map(int, arguments.share.split("/"))
    for number, (name, idea) in enumerate(ideas(arguments.round).items()):
        if number % shares != share - 1 or (arguments.only and arguments.only not in name):
            continue
        if arguments.learning_rate:
            idea = replace(idea, learning_rate=arguments.learning_rate)
        row = lab.tune(idea, blocks, arguments.steps, arguments.batch, arguments.seed)
        started = time.perf_counter()
        row["valid"] = lab.perplexity(valid, [M8, M5, M4, M3], idea.format, window)
        row["valid_seconds"] = time.perf_counter() - started
        print(name, {key: round(value, 3) for key, value in row["valid"].items()}, end=" ")
        print(f"{row['seconds']:.1f} s, {1e3 * row['step_seconds']:.1f} ms an update", flush=True)
        result["rows"][name] = row
        if arguments.json:
            common.write_json(Path(arguments.json), result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file or a Hugging Face folder")
    parser.add_argument("--train", required=True, help="WikiText-2's wiki.train.tokens, or its token ids as .npy")
    parser.add_argument("--valid", required=True, help="WikiText-2's wiki.valid.tokens, or its token ids as .npy")
    parser.add_argument("--round", default="20", help="which round of ideas; the last if left out")
    parser.add_argument("--only", help="rows whose name holds this text")
    parser.add_argument("--share", default="1/1", help="2/3: the second of three processes that share the rows")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--window", type=int, default=2048, help="tokens that are measured together")
    parser.add_argument("--windows", type=int, default=64, help="how many windows to measure on")
    parser.add_argument("--learning-rate", type=float, help="another one than each row's own, for another model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results there, after every row")
    parser.add_argument("--quick", action="store_true", help="two small updates each, for a look")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
