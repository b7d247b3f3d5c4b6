"""How far the largest weights of a group push the others' bits to the right, and what is lost by it, layer by layer.

    python -m experiments.outliers.run --text wiki.train.tokens --json FILE [--plot FILE]      # minutes on a CPU
    python -m experiments.outliers.run --show FILE --plot FILE                                 # draw an earlier run

A group shares the exponent of its largest weight; every other weight is shifted right by the difference to its own.

`shift`     that difference, over all weights that are not zero: at a width of m bits a weight shifted by d keeps m - d
            of them. `normal` beside it is what as many groups of normally distributed weights give.
`push`      by how much a group's exponent would fall without its largest weight (and without its 2 or 4 largest): the
            bits that one outlier takes from the other 63.
`zero`      weights whose value at a width is exactly 0, for each scheme. `nested` has a zero at E5M3 only; above it the
            two cells next to zero keep the sign and nothing else, which is `sign_only`.
`clipped`   weights beyond the largest code: for `nested` the same at every width, for `nearest` those that would round
            up to 2^m, for `truncate` none.
`clamped`   groups whose exponent lies outside [-14, 15].
`error`     the error of `nested` relative to the weights, and the share of its square in groups that one outlier pushes
            by a bit or more, to be compared with those groups' share of all groups.
`channels`  the same for groups through which an outlier of the activations passes: an input channel whose root mean
            square over the text is more than 6 times the median of its layer (projections that share an input count
            it once each). `output_error` weights each squared error by its channel's mean square, which is what
            reaches the layer's output where channels are uncorrelated.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments import analysis, common
from otaro import convert, sefp
from otaro.precision import Precision
from otaro.sefp import Format

SIZE = 64
SHIFTS = 16
PUSHES = 6
REMOVED = (1, 2, 4)
OUTLIER = 6.0
LOW = (Precision.E5M4, Precision.E5M3)


def own_exponent(values: Tensor) -> Tensor:
    """floor(log2 |w|), from the bits."""
    return ((values.float().view(torch.int32) & 0x7FFFFFFF) >> 23) - 127


def counted(values: Tensor, limit: int) -> np.ndarray:
    """How often each of 0, 1, …, the last one standing for all beyond."""
    return np.bincount(values.flatten().clamp(0, limit - 1).numpy(), minlength=limit).astype(np.float64)


def examine(weight: Tensor, mean_square: Tensor | None) -> dict[str, Any]:
    """Counts and sums over one matrix; they add up over matrices. `mean_square` is of its input channels."""
    weight = weight.detach().float()
    grouped = sefp.in_groups(weight, SIZE)
    real = sefp.in_groups(torch.ones_like(weight, dtype=torch.bool), SIZE)
    exponent = sefp.group_exponents(weight, SIZE)
    stored = exponent.clamp(sefp.EXPONENT_MIN, sefp.EXPONENT_MAX)
    scale = sefp.group_scales(weight, Format("nearest", SIZE))
    largest = grouped.abs().sort(-1, descending=True).values[..., : max(REMOVED) + 1]
    present = real & (grouped != 0)
    shift = (stored[..., None] - own_exponent(grouped))[present]
    pushes = {
        removed: (own_exponent(largest[..., 0]) - own_exponent(largest[..., removed]))[largest[..., removed] > 0]
        for removed in REMOVED
    }
    pushed = own_exponent(largest[..., 0]) > own_exponent(largest[..., 1])
    found: dict[str, Any] = {
        "weights": weight.numel(),
        "groups": scale.numel(),
        "clamped_below": int(((exponent < sefp.EXPONENT_MIN) & (scale > 0)).sum()),
        "clamped_above": int((exponent > sefp.EXPONENT_MAX).sum()),
        "already_zero": int((weight == 0).sum()),
        "shift": counted(shift, SHIFTS),
        "push": {removed: counted(values, PUSHES) for removed, values in pushes.items()},
        "pushed_groups": int(pushed.sum()),
        "squares": float(grouped.double().square().sum()),
        "zero": {},
        "clipped": {},
        "sign_only": {},
        "error": {},
        "error_in_pushed": {},
    }
    channels = None if mean_square is None else mean_square.sqrt() > OUTLIER * mean_square.sqrt().median()
    if channels is not None and mean_square is not None:
        touched = sefp.in_groups(channels, SIZE).any(-1)
        importance = sefp.in_groups(mean_square, SIZE)
        others = present & touched[..., None] & ~sefp.in_groups(channels, SIZE)
        without = present & ~touched[..., None]
        found["channels"] = {
            "outliers": int(channels.sum()),
            "channels": channels.numel(),
            "groups_touched": int(touched.sum()) * weight.shape[0],
            "shift_touched": counted((stored[..., None] - own_exponent(grouped))[others], SHIFTS),
            "shift_untouched": counted((stored[..., None] - own_exponent(grouped))[without], SHIFTS),
            "push_touched": counted(
                (own_exponent(largest[..., 0]) - own_exponent(largest[..., 1]))[touched.expand_as(stored)], PUSHES
            ),
            "output_squares": float((grouped.square() * importance).double().sum()),
            "output_error": {},
            "output_error_in_touched": {},
        }
    for precision in Precision:
        step = sefp.step(scale, precision)[..., None]
        top = 2**precision.mantissa
        values = {scheme: sefp.decode(sefp.encode(weight, precision, Format(scheme, SIZE))) for scheme in sefp.SCHEMES}
        for scheme, value in values.items():
            found["zero"].setdefault(scheme, {})[str(precision)] = int((value == 0).sum())
        nested = sefp.in_groups(values["nested"], SIZE)
        fitted = sefp.step(sefp.group_scales(weight, Format()), precision).abs()[..., None]
        found["sign_only"][str(precision)] = int(((nested.abs() == fitted / 2) & real).sum())
        size = grouped.abs() / torch.where(step > 0, step, 1.0)
        found["clipped"].setdefault("nearest", {})[str(precision)] = int((size >= top - 0.5).sum())
        if precision == Precision.E5M3:
            found["clipped"]["nested"] = int(((grouped.abs() > (top - 0.5) * fitted) & real).sum())
        error = ((grouped - nested).square() * real).double()
        found["error"][str(precision)] = float(error.sum())
        found["error_in_pushed"][str(precision)] = float(error[pushed].sum())
        if "channels" in found:
            output = error * importance
            found["channels"]["output_error"][str(precision)] = float(output.sum())
            found["channels"]["output_error_in_touched"][str(precision)] = float((output * touched[..., None]).sum())
    return found


def added(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of nested dictionaries of counts, key by key."""
    total: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, dict):
                total[key] = added([total.get(key, {}), value])
            else:
                total[key] = total.get(key, 0) + value
    return total


def shares(counts: dict[str, Any]) -> dict[str, Any]:
    """Counts as shares of the weights, groups or squares they belong to."""
    weights, groups = counts["weights"], counts["groups"]
    result: dict[str, Any] = {
        "weights": weights,
        "groups": groups,
        "clamped_below": counts["clamped_below"],
        "clamped_above": counts["clamped_above"],
        "already_zero": counts["already_zero"] / weights,
        "shift": distribution(counts["shift"]),
        "shift_mean": mean(counts["shift"]),
        "push": {removed: distribution(values) for removed, values in counts["push"].items()},
        "push_mean": {removed: mean(values) for removed, values in counts["push"].items()},
        "pushed_groups": counts["pushed_groups"] / groups,
        "zero": scaled(counts["zero"], weights),
        "sign_only": scaled(counts["sign_only"], weights),
        "clipped": scaled(counts["clipped"], weights),
        "relative_error": {width: (e / counts["squares"]) ** 0.5 for width, e in counts["error"].items()},
        "error_in_pushed": {w: counts["error_in_pushed"][w] / e for w, e in counts["error"].items() if e},
    }
    if "channels" in counts:
        found = counts["channels"]
        result["channels"] = {
            "outliers": found["outliers"],
            "channels": found["channels"],
            "groups_touched": found["groups_touched"] / groups,
            **{f"shift_mean_{name}": mean(found[f"shift_{name}"]) for name in ("touched", "untouched")},
            "push_mean_touched": mean(found["push_touched"]),
            "output_relative_error": {
                w: (e / found["output_squares"]) ** 0.5 for w, e in found["output_error"].items()
            },
            "output_error_in_touched": {
                w: found["output_error_in_touched"][w] / e for w, e in found["output_error"].items() if e
            },
        }
    return result


def scaled(counts: dict[str, Any], by: float) -> dict[str, Any]:
    return {key: scaled(value, by) if isinstance(value, dict) else value / by for key, value in counts.items()}


def distribution(counts: np.ndarray) -> list[float] | None:
    return (counts / counts.sum()).tolist() if counts.sum() else None


def mean(counts: np.ndarray) -> float | None:
    return float((counts * np.arange(len(counts))).sum() / counts.sum()) if counts.sum() else None


def activations(model: nn.Module, tokens: Tensor, names: list[str]) -> dict[str, Tensor]:
    """The mean square of every input channel of the linear layers named, over a text."""
    sums: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].detach().flatten(0, -2)
            sums[name] = sums.get(name, 0) + values.square().sum(0)

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    with torch.no_grad():
        for window in tokens:
            model(input_ids=window[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: total / tokens.numel() for name, total in sums.items()}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    windows = 1 if arguments.quick else arguments.windows
    model = common.load_model(arguments.model, torch.device("cpu"))
    targets = convert.find_targets(model)
    tokens = common.tokens_of(Path(arguments.text), arguments.model)
    tokens = tokens[: windows * arguments.length].view(windows, arguments.length)
    linear = [target.module for target in targets.values() if target.kind == "linear"]
    squares = activations(model, tokens, linear)
    result: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "group_size": SIZE,
        "tokens": tokens.numel(),
        "machine": common.machine(),
    }
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    by_layer: dict[int, list[dict[str, Any]]] = defaultdict(list)
    per_layer: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    everything = []
    for name, target in targets.items():
        weight = target.stored_weight(model.get_parameter(name).detach()).flatten(0, -2)
        counts = examine(weight, squares.get(target.module))
        layer, kind = analysis.place(name)
        by_kind[kind].append(counts)
        if layer is not None:
            by_layer[layer].append(counts)
            everything.append(counts)
            one = shares(counts)
            per_layer["shift_mean"][kind].append(one["shift_mean"])
            per_layer["pushed_groups"][kind].append(one["pushed_groups"])
            per_layer["zero_E5M3"][kind].append(one["zero"]["nested"]["E5M3"])
            per_layer["relative_error_E5M3"][kind].append(one["relative_error"]["E5M3"])
        if layer is not None and len(by_layer[layer]) == 1 and layer % 5 == 0:
            print(f"layer {layer}, {time.perf_counter() - started:.0f} s", flush=True)
    generator = torch.Generator().manual_seed(0)
    # Scales spread over an octave, as those of rows are: what one scale gives depends on where its powers of two lie.
    scale = 0.02 * 2 ** torch.rand(4000, 1, generator=generator)
    normal = examine(torch.randn(4000, 1024, generator=generator) * scale, None)
    result.update(
        linear=shares(added(everything)),
        normal=shares(normal),
        kinds={kind: shares(added(parts)) for kind, parts in by_kind.items()},
        layers={layer: brief(shares(added(parts))) for layer, parts in by_layer.items()},
        layers_and_kinds=per_layer,
        seconds=time.perf_counter() - started,
    )
    analysis.write(arguments.json, result)
    return result


def brief(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one layer."""
    kept = ("shift_mean", "pushed_groups", "clamped_below", "clamped_above", "already_zero")
    return {
        **{key: found[key] for key in kept},
        "push_mean": found["push_mean"][1],
        **{f"zero_{width}": found["zero"]["nested"][str(width)] for width in LOW},
        **{f"sign_only_{width}": found["sign_only"][str(width)] for width in LOW},
        **{f"relative_error_{width}": found["relative_error"][str(width)] for width in LOW},
        "clipped": found["clipped"]["nested"],
        "outlier_channels": found["channels"]["outliers"],
        "output_relative_error_E5M3": found["channels"]["output_relative_error"]["E5M3"],
    }


def show(result: dict[str, Any]) -> None:
    rows = {"all linear layers": result["linear"], "normal weights": result["normal"], **result["kinds"]}
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "mean shift, bits": lambda row: f"{row['shift_mean']:.2f}",
        "pushed by 1+ bit": lambda row: f"{row['pushed_groups']:.1%}",
        "by 2+": lambda row: f"{sum(row['push']['1'][2:]):.2%}",
        "zero at M3": lambda row: f"{row['zero']['nested']['E5M3']:.1%}",
        "sign only at M4": lambda row: f"{row['sign_only']['E5M4']:.1%}",
        "clipped": lambda row: f"{row['clipped']['nested']:.2%}",
        "relative error at M3": lambda row: f"{row['relative_error']['E5M3']:.3f}",
        "of it in pushed groups": lambda row: f"{row['error_in_pushed']['E5M3']:.1%}",
        "clamped": lambda row: f"{row['clamped_below']} + {row['clamped_above']}",
    }
    print(f"\n| weights | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(column(row) for column in columns.values())} |")
    names = [str(precision) for precision in Precision]
    print(f"\n| share of weights that are 0 | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for scheme, zero in result["linear"]["zero"].items():
        print(f"| {scheme} | {' | '.join(f'{zero[name]:.1%}' for name in names)} |")
    sign_only = result["linear"]["sign_only"]
    print(f"| nested, sign only | {' | '.join(f'{sign_only[name]:.1%}' for name in names)} |")
    found = result["linear"]["channels"]
    print(
        f"\noutlier channels: {found['outliers']} of {found['channels']}, in {found['groups_touched']:.1%} of groups; "
        f"mean shift there {found['shift_mean_touched']:.2f} bits, elsewhere {found['shift_mean_untouched']:.2f}; "
        f"output error at E5M3 {found['output_relative_error']['E5M3']:.3f} of the output, "
        f"{found['output_error_in_touched']['E5M3']:.1%} of it in these groups"
    )


def plot(result: dict[str, Any], file: Path) -> None:
    figure, axes = analysis.figure(2, 2, (14, 10))
    shift, zero, push, heat = axes.flat
    kinds = list(result["kinds"])
    for kind in kinds:
        shift.plot(result["kinds"][kind]["shift"], marker=".", label=kind)
    shift.plot(result["normal"]["shift"], "k--", label="normal weights")
    shift.set(xlabel="shift: exponent of the group - own exponent, bits", ylabel="share of weights", yscale="log")
    shift.set_ylim(bottom=1e-5)
    shift.set_title(f"How far weights are shifted ({SHIFTS - 1} and more in the last point)")
    shift.legend(fontsize=8, ncols=2)

    names = [str(precision) for precision in Precision]
    for scheme, values in result["linear"]["zero"].items():
        share = [values[name] if values[name] else np.nan for name in names]
        zero.plot(names, share, marker="o", label=f"{scheme}: value 0")
    sign_only = [result["linear"]["sign_only"][name] or np.nan for name in names]
    zero.plot(names, sign_only, marker="s", linestyle=":", label="nested: sign only")
    zero.set(xlabel="width", ylabel="share of weights", yscale="log")
    zero.set_title("Weights of linear layers that keep no mantissa bit")
    zero.legend()

    position = np.arange(len(kinds) + 1)
    bottom = np.zeros(len(position))
    rows = [*(result["kinds"][kind]["push"]["1"] for kind in kinds), result["normal"]["push"]["1"]]
    for bits in range(1, PUSHES):
        height = np.array([row[bits] for row in rows])
        push.bar(
            position, height, bottom=bottom, label=f"{bits} bit{'s' * (bits > 1)}{' or more' * (bits == PUSHES - 1)}"
        )
        bottom += height
    push.set_xticks(position, [*kinds, "normal\nweights"])
    push.set(xlabel="kind of weight", ylabel="share of groups", ylim=(0, 1.15 * bottom.max()))
    push.set_title("Bits the largest weight takes from the other 63")
    push.legend()

    grid = result["layers_and_kinds"]["relative_error_E5M3"]
    image = heat.imshow(np.array(list(grid.values())), aspect="auto", cmap="viridis")
    heat.set_yticks(range(len(grid)), list(grid))
    heat.set(xlabel="layer", ylabel="kind of weight")
    heat.set_title("Error of the weights at E5M3")
    figure.colorbar(image, ax=heat, label="‖w - value‖ / ‖w‖")
    for axis in (shift, zero, push):
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="WikiText-2's wiki.train.tokens, or its token ids as .npy: for the activations")
    parser.add_argument("--windows", type=int, default=4, help="windows of the text to run")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    analysis.main(parser, run, show, plot)
