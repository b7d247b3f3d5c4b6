"""Which errors should decide the scale of a group: at one width, or at several? Untuned, and tuned without widths.

    python -m experiments.error_width.run --train train.npy --texts valid.npy test.npy \
        --json experiments/error_width/rules.json
    python -m experiments.error_width.run --train train.npy --texts valid.npy --quick       # for a look on a CPU

A rule is written as a sum: `M4+4M5` is the squared error at E5M4 plus four times that at E5M5; `M5 of 8` chooses from
2^E times 1.5 and 1.75 too, not from the product's six, and `M5 of 5` not from 2^E times 1.25 (`rules.json` is of those
five). Errors are whole numbers, as in the product, in units of 2^(E-10), but those at E5M5 alone in units of 2^(E-11)
and those with E5M8 in units of 2^(E-12). Linear layers only; their weights are replaced by their values. The file is
written after every rule.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import common, tuning
from experiments.format.run import targets
from otaro import sefp
from otaro.json_file import write_json
from otaro.precision import Precision
from otaro.sefp import Format
from otaro.tune.data import text_blocks

RULES = ("M5", "M4+4M5", "M4", "M5 of 8", "M4 of 8", "M4+M8", "M4+3M8")
WIDTHS = (Precision.E5M8, Precision.E5M5, Precision.E5M4, Precision.E5M3)


def parse(rule: str) -> dict[Precision, int]:
    """The weight of the error at each width: `M4+4M5`."""
    terms = [re.fullmatch(r"(\d*)M(\d)", term) for term in rule.partition(" of ")[0].split("+")]
    if not all(terms):
        raise SystemExit(f"{rule!r} is no sum of widths such as M4+4M5")
    return {Precision.from_mantissa(int(term[2])): int(term[1] or 1) for term in terms if term}


def squared_errors(grouped: Tensor, first: Tensor, candidate: Tensor, rule: dict[Precision, int]) -> Tensor:
    """The weighed errors of groups with the scale `candidate`, `first` being the byte of 2^E."""
    unit = 12 if Precision.E5M8 in rule else 11 if list(rule) == [Precision.E5M5] else 10
    scaled = grouped * sefp.power_of_two(unit - 1 + sefp.EXPONENT_OFFSET - (first >> 2))[..., None]
    target = 2 * torch.floor(scaled).clamp(-(2**unit), 2**unit - 1).to(torch.int32) + 1
    code = sefp._nested_code(grouped, candidate).to(torch.int32)
    total = torch.zeros_like(first, dtype=torch.int64)
    for width, weight in rule.items():
        cut = code >> (8 - width.mantissa)
        size = 4 + (candidate & 3) << (unit - 2 - width.mantissa + (candidate >> 2) - (first >> 2))
        value = (2 * cut + int(2 * sefp.nested_bias(width))) * size[..., None]
        total += weight * (target - value).square().sum(-1)
    return total


def scales(weight: Tensor, name: str) -> Tensor:
    """The scale of every group by a rule; the rows are whole groups."""
    rule, count = parse(name), int(name.partition(" of ")[2] or sefp.CANDIDATES)
    grouped = sefp.in_groups(weight.float(), 64)
    first = (sefp.group_exponents(weight, 64).clamp(sefp.EXPONENT_MIN, sefp.EXPONENT_MAX) + sefp.EXPONENT_OFFSET) << 2
    negative = grouped.amax(-1) > -grouped.amin(-1)
    grouped = torch.where(negative[..., None], -grouped, grouped)
    candidates = [(first + offset).clamp(sefp.SCALE_MIN, sefp.SCALE_MAX) for offset in range(count - 5, -5, -1)]
    scale, least = candidates[0], squared_errors(grouped, first, candidates[0], rule)
    for candidate in candidates[1:]:
        error = squared_errors(grouped, first, candidate, rule)
        scale, least = torch.where(error < least, candidate, scale), torch.minimum(error, least)
    scale = scale | negative * sefp.SCALE_SIGN
    return torch.where((grouped == 0).all(-1), torch.zeros_like(scale), scale).to(torch.uint8)


def measure(model: Any, texts: dict[str, Tensor], rules: list[str], arguments: argparse.Namespace) -> Any:
    """Yields what is known of a model so far: perplexity by text, rule and width."""
    linear, _ = targets(model)
    original = {name: weight.detach().clone() for name, weight in linear.items()}
    window, batch = arguments.window, arguments.batch
    result: dict[str, Any] = {
        text: {"full precision": common.perplexity(model, tokens, window, batch)} for text, tokens in texts.items()
    }
    for name in rules:
        started = time.perf_counter()
        found = {layer: scales(weight, name) for layer, weight in original.items()}
        for precision in WIDTHS:
            with torch.no_grad():
                for layer, weight in linear.items():
                    codes = sefp.encode_unchecked(original[layer], precision, Format(), scale=found[layer])
                    weight.copy_(sefp.decode(codes))
            for text, tokens in texts.items():
                perplexity = common.perplexity(model, tokens, window, batch)
                result[text].setdefault(name, {})[str(precision)] = perplexity
        figures = {text: [round(value, 3) for value in result[text][name].values()] for text in texts}
        print(f"{name}: {figures}  ({time.perf_counter() - started:.1f} s)", flush=True)
        yield result
    with torch.no_grad():
        for layer, weight in linear.items():
            weight.copy_(original[layer])


def tuned(model: Any, train: Tensor, arguments: argparse.Namespace) -> None:
    """Tune a copy of the model without any width, and take over its weights."""
    pupil = common.load_model(arguments.model)
    options = {"max_steps": arguments.steps, "per_device_train_batch_size": arguments.train_batch, "compile": False}
    tuning.tune(pupil, text_blocks(train, arguments.length), "fp16", 0, **options)
    weights = dict(pupil.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file or a Hugging Face folder")
    parser.add_argument("--train", type=Path, help="the text to tune on: left out, the untuned model only is measured")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="WikiText-2 files, or token ids as .npy")
    parser.add_argument("--rules", default=",".join(RULES), help="with commas between")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--train-batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of a block that is tuned on")
    parser.add_argument("--window", type=int, default=2048, help="tokens that are measured together")
    parser.add_argument("--batch", type=int, default=8, help="windows at a time")
    parser.add_argument("--windows", type=int, help="measure this many windows, evenly spread, not all")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--quick", action="store_true", help="two small windows and updates, for a look on a CPU")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.window, arguments.windows, arguments.steps = 128, 2, 2
        arguments.train_batch, arguments.length = 1, 128
    torch.set_float32_matmul_precision("high")
    texts = {path.stem: common.tokens_of(path, arguments.model) for path in arguments.texts}
    if arguments.windows:
        for name, tokens in texts.items():
            cut = tokens[: len(tokens) // arguments.window * arguments.window].view(-1, arguments.window)
            texts[name] = cut[:: len(cut) // arguments.windows][: arguments.windows].flatten()
    record: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "settings": {key: getattr(arguments, key) for key in ("steps", "train_batch", "length", "window", "windows")},
        "machine": common.machine(),
        "perplexity": {},
    }
    model = common.load_model(arguments.model)
    for state in ("untuned", "fp16") if arguments.train else ("untuned",):
        print(state, flush=True)
        if state == "fp16":
            tuned(model, common.tokens_of(arguments.train, arguments.model), arguments)
        for result in measure(model, texts, arguments.rules.split(","), arguments):
            record["perplexity"][state] = result
            if arguments.json:
                write_json(record, arguments.json)


if __name__ == "__main__":
    main()
