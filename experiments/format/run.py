"""How the schemes and their refinements hold up before any tuning: perplexity on WikiText-2 at every width.

    python -m experiments.format.run --text wiki.test.tokens --json experiments/format/wikitext-test.json
    python -m experiments.format.run --text wiki.test.tokens --quick        # a few windows, on a CPU

Weights are replaced by the values they take at each width, nothing else changes; `rows` lists what is compared.
Windows of 2048 tokens without overlap, float32 arithmetic. `--show FILE` prints the tables of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments import common
from otaro import convert, ops, sefp
from otaro.json_file import write_json
from otaro.precision import NARROWEST, WIDEST, Precision
from otaro.sefp import Format

Quantizer = Callable[[Tensor, Precision], Tensor]


def direct(format: Format) -> Quantizer:
    """Each width encoded from the weight itself."""
    return lambda weight, precision: sefp.decode(sefp.encode(weight, precision, format))


def sliced(format: Format) -> Quantizer:
    """Each width cut from the E5M8 codes, as a packed model does it."""
    return lambda weight, precision: ops.fake_quantize(weight, precision, format)


def half_step(weight: Tensor, precision: Precision) -> Tensor:
    """Truncated codes decoded in the middle of their cell: no zero at all."""
    codes = sefp.encode(weight, precision, Format("truncate"))
    centred = (
        sefp.decode(codes).abs()
        + sefp.step(codes.scale, precision).repeat_interleave(64, -1)[..., : weight.shape[-1]] / 2
    )
    return torch.where(codes.code >> precision.mantissa != 0, -centred, centred)


def fitted(magnitudes: Sequence[float], width: Precision | None, *, signed: bool = True) -> Quantizer:
    """``nested`` with other scales: 2^E times the magnitude that has the least squared error at a width, the first one
    if none is named; `signed` negates a group whose largest weight is positive."""

    def values(grouped: Tensor, scale: Tensor, precision: Precision) -> Tensor:
        code = (torch.floor(grouped / (scale / 128)) + sefp.NESTED_OFFSET).clamp(16 if signed else 32, sefp.NESTED_MAX)
        cut = torch.floor(code / 2 ** (WIDEST.mantissa - precision.mantissa))
        return (cut + sefp.nested_bias(precision)) * scale * 2.0 ** (1 - precision.mantissa)

    found: dict[int, tuple[Tensor, Tensor]] = {}

    def quantize(weight: Tensor, precision: Precision) -> Tensor:
        if id(weight) not in found:  # the same weights come again at every width
            found[id(weight)] = scales(weight)
        sign, scale = found[id(weight)]
        grouped = sefp.in_groups(weight, 64) * sign
        return (sign * values(grouped, scale, precision)).flatten(-2)[..., : weight.shape[-1]]

    def scales(weight: Tensor) -> tuple[Tensor, Tensor]:
        grouped = sefp.in_groups(weight, 64)
        exponent = sefp.group_exponents(weight, 64).clamp(sefp.EXPONENT_MIN, sefp.EXPONENT_MAX)
        sign = torch.where(signed & (grouped.amax(-1) > -grouped.amin(-1)), -1.0, 1.0)[..., None]
        grouped, power = grouped * sign, sefp.power_of_two(exponent)[..., None]
        chosen, least = power * magnitudes[0], torch.full_like(power, torch.inf)
        for magnitude in magnitudes if width is not None else ():
            error = (grouped - values(grouped, power * magnitude, width)).square().sum(-1, keepdim=True)
            chosen = torch.where(error < least, power * magnitude, chosen)
            least = torch.minimum(least, error)
        return sign, chosen

    return quantize


@dataclass(frozen=True)
class Row:
    table: str
    name: str
    quantizer: Quantizer
    embedding_floor: Precision | None = None
    """Embeddings (and the tied head) at this width or the model's, whichever is wider; None leaves them alone."""


def rows() -> Iterator[Row]:
    yield Row("schemes", "truncate", sliced(Format("truncate")))
    yield Row("schemes", "truncated codes, half-step decode", half_step)
    yield Row("schemes", "nearest, each width from the original", direct(Format("nearest")))
    yield Row("schemes", "nearest, sliced from E5M8", sliced(Format("nearest")))
    yield Row("schemes", "nested", sliced(Format()))
    by = Precision
    power, halves, quarters, eighths = ([1 + k / n for k in range(n)] for n in (1, 2, 4, 8))
    yield Row("scale of nested", "2^E", fitted(power, None, signed=False))
    yield Row("scale of nested", "2^E, signed", fitted(power, None))
    for name, below in {"× 1": power, "× 1, 1.5": halves, "× 1 … 1.75": quarters, "× 1 … 1.875": eighths}.items():
        for width in (by.E5M5, by.E5M4, by.E5M3) if below is quarters else (by.E5M5, by.E5M4):
            magnitudes = [1.0, *(magnitude / 2 for magnitude in reversed(below))]
            yield Row("scale of nested", f"2^E or 2^(E-1) {name}, signed, by {width}", fitted(magnitudes, width))
    for size in (32, 128, 256):
        yield Row("group size", f"nested, groups of {size}", sliced(Format(group_size=size)))
    for floor in (by.E5M3, by.E5M4, by.E5M5, by.E5M6):
        name = "at the model's width" if floor == by.E5M3 else f"never under {floor}"
        yield Row("embeddings and head", name, sliced(Format()), floor)


def targets(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The weights of linear layers, and those of embeddings and head (once where they are tied)."""
    linear, embedding = {}, {}
    for name, target in convert.find_targets(model).items():
        (linear if target.floor == NARROWEST else embedding)[name] = model.get_parameter(name)
    return linear, embedding


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")  # TF32 holds every value but some of E5M8 to the bit
    model = common.load_model(arguments.model)
    tokens = common.tokens_of(Path(arguments.text), arguments.model)
    widths = [Precision(width) for width in arguments.widths.split(",")] if arguments.widths else list(Precision)
    if arguments.quick:
        arguments.window, widths = 256, [Precision.E5M8, Precision.E5M4, Precision.E5M3]
        tokens = tokens[: 2 * arguments.window]
    linear, embedding = targets(model)
    original = {name: weight.detach().clone() for name, weight in (linear | embedding).items()}
    result: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "text": Path(arguments.text).name,
        "tokens": len(tokens),
        "window": arguments.window,
        "linear_weights": sum(weight.numel() for weight in linear.values()),
        "embedding_weights": sum(weight.numel() for weight in embedding.values()),
        "clamped_groups": clamped_groups(original),
        "machine": common.machine(),
        "full_precision": common.perplexity(model, tokens, arguments.window, arguments.batch),
        "tables": {},
    }
    print(f"full precision: {result['full_precision']:.4f}", flush=True)
    for row in rows():
        if arguments.only and row.table not in arguments.only.split(";"):
            continue
        if arguments.rows and row.name not in arguments.rows.split(";"):
            continue
        started = time.perf_counter()
        measured = {}
        for precision in widths:
            with torch.no_grad():
                for name, weight in linear.items():
                    weight.copy_(row.quantizer(original[name], precision))
                for name, weight in embedding.items():
                    floor = row.embedding_floor
                    weight.copy_(
                        original[name] if floor is None else row.quantizer(original[name], max(precision, floor))
                    )
            measured[str(precision)] = common.perplexity(model, tokens, arguments.window, arguments.batch)
        result["tables"].setdefault(row.table, {})[row.name] = measured
        values = "  ".join(f"{value:.3f}" for value in measured.values())
        print(f"{row.table} | {row.name}: {values}  ({time.perf_counter() - started:.1f} s)", flush=True)
        if arguments.json:
            write_json(result, Path(arguments.json))
    return result


def clamped_groups(weights: dict[str, Tensor]) -> dict[str, int]:
    counts = {"groups": 0, "below": 0, "above": 0}
    for weight in weights.values():
        exponent = sefp.group_exponents(weight, 64)
        counts["groups"] += exponent.numel()
        counts["below"] += int(((exponent < sefp.EXPONENT_MIN) & (sefp.group_scales(weight, Format()) > 0)).sum())
        counts["above"] += int((exponent > sefp.EXPONENT_MAX).sum())
    return counts


def show(result: dict[str, Any]) -> None:
    for table, lines in result["tables"].items():
        names = list(next(iter(lines.values())))
        print(f"\n| {table} | {' | '.join(name[2:] for name in names)} |")
        print("|---" * (len(names) + 1) + "|")
        for name, measured in lines.items():
            print(f"| {name} | {' | '.join(f'{measured[width]:.2f}' for width in names)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file or a Hugging Face folder")
    parser.add_argument("--text", help="WikiText-2's wiki.test.tokens, or its token ids as .npy")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8, help="windows at a time")
    parser.add_argument("--only", help="these tables only, with ; between")
    parser.add_argument("--rows", help="these rows only, with ; between")
    parser.add_argument("--widths", help="these widths only, with commas between")
    parser.add_argument("--json", help="write the results there, after every row")
    parser.add_argument("--quick", action="store_true", help="two small windows and three widths only, for a look")
    parser.add_argument("--show", help="print the tables of an earlier run and stop")
    arguments = parser.parse_args()
    if arguments.show:
        show(json.loads(Path(arguments.show).read_text()))
    elif arguments.text:
        show(run(arguments))
    else:
        parser.error("--text or --show is needed")


if __name__ == "__main__":
    main()
