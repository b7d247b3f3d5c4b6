"""What quantisation does to the gradient from batch to batch: the paper's Fig. 5, Fig. 6 and the 1/√N law of Eq. 17.

    python -m experiments.gradient_noise.run --text wiki.train.tokens --json FILE
    python -m experiments.gradient_noise.run --text wiki.train.tokens --quick               # on a CPU
    python -m experiments.gradient_noise.run --show FILE --plot FILE                        # draw an earlier run

The same batches go through the model at full precision and at every width, in up to three modes: `still` (the weights
stay as they are), `sgd` (1e-5, the paper's) and `adamw` (3e-5). The last two update the weights after every batch by
the gradient of the paper's Eq. 4, the mean over the widths.

**Fig. 5.** e_t = |‖∇sefp‖ - ‖∇fp‖| of batch t. The paper sees it oscillate periodically and takes this for the sawtooth
of rounding that weights pass through as they are tuned. Weights that do not move pass through nothing, so what `still`
shows cannot come from there; `codes_changed` is the share of weights whose code changed at all. What the table says
of the order of errors goes by their ranks, since a batch in 200 may have a hundred times the median's: the correlation
of a tuned series with the still one on the same batches, and, less a straight line, autocorrelations outside ±1.96/√n
(1 in 20 is expected of white noise) and Fisher's g test on the periodogram.

**Fig. 6 and Eq. 17.** Y = ∇sefp - X·∇fp, `still` only: see perturbation.py.

On a GPU products are in TF32 for speed. `floor` holds what that does to the full-precision gradient of the first
batches, against float32 without TF32, relative to that gradient: to be compared with each width's `relative_size` and
`mean`, and to be far below them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import analysis, common
from experiments.gradient_noise.perturbation import Sample, last_down, perturbation, weighted
from otaro import ops
from otaro.evaluate.results import Width
from otaro.precision import Precision

MODES = ("still", "sgd", "adamw")
SHOWN = ("model", "last down projection")
"""The places whose series are kept: all, and the paper's."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    widths: list[Width] = [None, *Precision]
    if arguments.quick:
        arguments.batches, arguments.batch, arguments.length, arguments.modes = 4, 1, 64, "still,adamw"
        widths = [None, Precision.E5M8, Precision.E5M4, Precision.E5M3]
    modes = arguments.modes.split(",")
    if not set(modes) <= set(MODES) or modes[0] != "still":
        raise SystemExit(f"--modes are some of {','.join(MODES)}, still first: the others are compared with it")
    gradients, device = analysis.load(arguments)
    tokens = common.tokens_of(Path(arguments.text), arguments.model)
    # One batch more than is measured: its gradient only tells where to look.
    batches = analysis.Batches(tokens, arguments.batches + 1, arguments.batch, arguments.length, arguments.seed)
    gradients(batches.pop().to(device), None)
    sample = Sample(gradients, device)
    original = {name: parameter.detach().clone() for name, parameter in gradients.parameters.items()}
    result: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "format": dataclasses.asdict(gradients.format),
        "batches": arguments.batches,
        "batch": arguments.batch,
        "sequence": arguments.length,
        "seed": arguments.seed,
        "arithmetic": arguments.arithmetic if device.type == "cuda" else "float32",
        "machine": common.machine(),
        "widths": [str(width) for width in widths[1:]],
        "floor": floor(gradients, batches, sample, arguments, device),
        "norms": {},
        "seconds": {},
    }
    still: dict[str, np.ndarray] = {}
    for mode in modes:
        with torch.no_grad():
            for name, parameter in gradients.parameters.items():
                parameter.copy_(original[name])
        started = time.perf_counter()
        norms, history, losses = measure(gradients, batches, widths, mode, sample if mode == "still" else None, device)
        result["seconds"][mode] = time.perf_counter() - started
        errors = norm_errors(norms, list(gradients.parameters), sample.names)
        still = still or errors
        result["norms"][mode] = norm_summary(errors, still, result["widths"], losses)
        if history is not None:
            targets = [list(gradients.parameters).index(name) for name in sample.names]
            exact = np.sqrt((norms[:, :, targets] ** 2).sum(-1)).T
            ratio = weighted(history, sample.weight).cpu().numpy() / exact
            result["sampling"] = {"mean": ratio.mean(), "deviation": ratio.std()}
            result["perturbation"] = perturbation(history, sample, result["widths"])
            del history
        if mode != "still":
            result["norms"][mode]["codes_changed"] = codes_changed(gradients, original, sample.names)
        analysis.write(arguments.json, result)
    return result


def measure(
    gradients: analysis.Gradients,
    batches: analysis.Batches,
    widths: list[Width],
    mode: str,
    sample: Sample | None,
    device: torch.device,
) -> tuple[np.ndarray, Tensor | None, np.ndarray]:
    """Norms [batches, widths, parameters], sampled gradients [widths, batches, coordinates], losses."""
    parameters = list(gradients.parameters.values())
    history = None
    if sample is not None:
        history = torch.empty((len(widths), len(batches), len(sample.weight)), device=device)
    make: dict[str, Callable[[], torch.optim.Optimizer | None]] = {
        "still": lambda: None,
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-5),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=3e-5, weight_decay=0.0),
    }
    optimizer = make[mode]()
    norms, losses = [], []
    started = time.perf_counter()
    for index in range(len(batches)):
        batch = batches[index].to(device)
        mean: list[Tensor] = []
        for position, width in enumerate(widths):
            losses.append(gradients(batch, width))
            found = [parameter.grad for parameter in parameters]
            norms.append(torch.stack(torch._foreach_norm(found)))  # type: ignore[arg-type]
            if history is not None and sample is not None:
                history[position, index] = sample.take()
            if optimizer is not None and width is not None:
                torch._foreach_div_(found, len(widths) - 1)  # type: ignore[arg-type]
                if mean:
                    torch._foreach_add_(mean, found)  # type: ignore[arg-type]
                else:
                    mean = found  # type: ignore[assignment]
            gradients.model.zero_grad(set_to_none=True)
        if optimizer is not None:
            for parameter, gradient in zip(parameters, mean, strict=True):
                parameter.grad = gradient
            optimizer.step()
        if (index + 1) % max(len(batches) // 10, 1) == 0:
            print(f"{mode}: batch {index + 1} of {len(batches)}, {time.perf_counter() - started:.0f} s", flush=True)
    shape = (len(batches), len(widths))
    return (
        torch.stack(norms).double().cpu().numpy().reshape(*shape, -1),
        history,
        torch.stack(losses).cpu().numpy().reshape(shape),
    )


def floor(
    gradients: analysis.Gradients,
    batches: analysis.Batches,
    sample: Sample,
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, float] | None:
    """What TF32 alone does to the full-precision gradient, relative to it; None where it is not used."""
    if device.type != "cuda" or arguments.arithmetic != "tf32":
        return None
    size, norm = [], []
    for index in range(min(4, len(batches))):
        found = []
        for setting in ("highest", "high"):
            torch.set_float32_matmul_precision(setting)
            gradients(batches[index].to(device), None)
            norms = torch._foreach_norm([parameter.grad for parameter in gradients.parameters.values()])  # type: ignore[arg-type]
            found.append((sample.take(), torch.stack(norms).norm()))
        (exact, exact_norm), (fast, fast_norm) = found
        size.append(float(weighted(fast - exact, sample.weight) / weighted(exact, sample.weight)))
        norm.append(float(abs(fast_norm - exact_norm) / exact_norm))
    return {"difference": max(size), "norm_error": max(norm)}


def norm_errors(norms: np.ndarray, parameters: list[str], targets: list[str]) -> dict[str, np.ndarray]:
    """‖∇sefp‖ - ‖∇fp‖ for places large and small, [batches, widths], and the norm at full precision beside it."""
    places = {name: analysis.place(name) for name in targets}
    chosen: dict[str, list[str]] = {"model": parameters}
    for name, (_, kind) in places.items():
        chosen.setdefault(kind, []).append(name)
    for name, (layer, _) in places.items():
        if layer is not None:
            chosen.setdefault(f"layer {layer}", []).append(name)
    chosen[SHOWN[1]] = [last_down(targets)]
    errors = {}
    for place, names in chosen.items():
        total = np.sqrt((norms[:, :, [parameters.index(name) for name in names]] ** 2).sum(-1))
        errors[place] = np.concatenate([total[:, :1], total[:, 1:] - total[:, :1]], 1)
    return errors


def norm_summary(
    errors: dict[str, np.ndarray], still: dict[str, np.ndarray], widths: list[str], losses: np.ndarray
) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "loss_first_last_tenth": [
            dict(zip(["full", *widths], part.mean(0).tolist(), strict=True))
            for part in (losses[: max(len(losses) // 10, 1)], losses[-max(len(losses) // 10, 1) :])
        ],
        "places": {},
        "series": {},
    }
    for place, series in errors.items():
        full = series[:, 0].mean()
        if place.startswith("layer ") and errors is not still:
            continue
        summary["places"][place] = {"full_norm": full}
        for column, width in enumerate(widths, 1):
            signed, error = series[:, column], np.abs(series[:, column])
            row = {
                "mean": error.mean() / full,
                "deviation": error.std(ddof=1) / full,
                "signed_mean": signed.mean() / full,
            }
            summary["places"][place][width] = row
    for place in SHOWN:
        relative = errors[place] / errors[place][:, 0].mean()
        summary["series"][place] = analysis.rounded(dict(zip(["full", *widths], relative.T, strict=True)), 4)
    return summary


def ranks(series: list[float]) -> np.ndarray:
    """Errors by their order of size: a single batch has a hundred times the median's and would hide all others."""
    return np.abs(series).argsort().argsort().astype(float)


def order(result: dict[str, Any], mode: str, place: str, width: str) -> dict[str, Any]:
    """Is there more in the order of the errors than in white noise?"""
    series = ranks(result["norms"][mode]["series"][place][width])
    still = ranks(result["norms"]["still"]["series"][place][width])
    count = len(series)
    index = np.arange(count)
    flat = series - np.polyval(np.polyfit(index, series, 1), index)
    lags = min(50, count // 4)
    found = np.array([(flat[:-lag] * flat[lag:]).sum() for lag in range(1, lags + 1)]) / (flat**2).sum()
    power = np.abs(np.fft.rfft(flat)[1 : (count - 1) // 2 + 1]) ** 2
    share = power.max() / power.sum()
    terms = len(power)
    # Fisher's g: the largest of `terms` ordinates of white noise exceeds this share with at most this probability.
    chance = min(1.0, terms * (1 - share) ** (terms - 1))
    return {
        "same_as_still": float(np.corrcoef(series, still)[0, 1]),
        "autocorrelation": found,
        "outside_band": float((np.abs(found) > 1.96 / np.sqrt(count)).mean()) if lags else 0.0,
        "period": count / (1 + int(power.argmax())),
        "period_chance": float(chance),
    }


def codes_changed(gradients: analysis.Gradients, original: dict[str, Tensor], names: list[str]) -> dict[str, float]:
    """The share of weights whose value at a width is no longer what it was."""
    changed = {}
    for width in (Precision.E5M8, Precision.E5M3):
        moved = total = 0
        for name in names:
            before, after = (
                ops.fake_quantize(weight.detach(), width, gradients.format)
                for weight in (original[name], gradients.parameters[name])
            )
            moved += int((before != after).sum())
            total += before.numel()
        changed[str(width)] = moved / total
    return changed


def show(result: dict[str, Any]) -> None:
    widths = result["widths"]
    head = f"{' | '.join(widths)} |\n" + "|---" * (len(widths) + 1) + "|"
    print(f"\n| ‖∇sefp‖ - ‖∇fp‖ in absolute value, relative to ‖∇fp‖: mean ± deviation | {head}")
    for mode, measured in result["norms"].items():
        for place in SHOWN:
            rows = [measured["places"][place][width] for width in widths]
            cells = (f"{row['mean']:.4f} ± {row['deviation']:.4f}" for row in rows)
            print(f"| {mode}, {place} | {' | '.join(cells)} |")
    print(f"\n| order of that series, by ranks | {head}")
    labels = {
        "same_as_still": "correlation with the still series",
        "outside_band": "autocorrelations outside the band",
        "period": "strongest period, batches",
        "period_chance": "chance of so strong a period",
    }
    for mode, place in itertools.product(result["norms"], SHOWN):
        rows = [order(result, mode, place, width) for width in widths]
        for key, label in labels.items():
            print(f"| {mode}, {place}: {label} | {' | '.join(f'{row[key]:.3g}' for row in rows)} |")
    for mode, measured in result["norms"].items():
        if "codes_changed" in measured:
            print(f"{mode}: share of codes changed: {measured['codes_changed']}")
    found = result["perturbation"]["widths"]
    estimates = {width: found[width]["estimates"] for width in widths}
    for name in next(iter(estimates.values())):
        print(f"\n| Y with X by {name} | {head}")
        rows = {
            "‖Y‖ / ‖∇fp‖": [estimates[width][name]["relative_size"] for width in widths],
            f"mean z² ({(result['batches'] - 1) / (result['batches'] - 3):.2f} if E[Y] = 0)": [
                estimates[width][name]["z"]["mean_square"] for width in widths
            ],
            "beyond 1.96": [estimates[width][name]["z"]["beyond_1.96"] for width in widths],
            **{
                f"slope of {part}": [estimates[width][name]["law"]["slopes"][part] for width in widths]
                for part in ("perturbation", "gradient", "ratio")
            },
        }
        for label, values in rows.items():
            print(f"| {label} | {' | '.join(f'{value:.3f}' for value in values)} |")
    print(f"\nfull-precision gradient: {result['perturbation']['gradient']}")
    print(f"norms from the sample over true ones: {result['sampling']}\nTF32: {result['floor']}")


def plot(result: dict[str, Any], file: Path) -> None:
    widths, norms = result["widths"], result["norms"]
    figure, axes = analysis.figure(2, 3, (18, 10))
    series, spread, echo, values, ratio, growth = axes.flat
    colours = dict(zip(widths, analysis.colours(len(widths)), strict=True))
    still = norms["still"]

    for width in widths:
        series.plot(np.abs(still["series"][SHOWN[1]][width]), color=colours[width], linewidth=0.9, label=width)
    series.set(xlabel="batch", ylabel="| ‖∇sefp‖ - ‖∇fp‖ | / mean ‖∇fp‖", yscale="log")
    series.set_title(f"Fig. 5, weights not updated: {SHOWN[1]}")
    series.legend(fontsize=8, ncols=2)

    for offset, (mode, measured) in enumerate(norms.items()):
        found = np.abs([measured["series"][SHOWN[0]][width] for width in widths])
        low, middle, high = np.quantile(found, (0.25, 0.5, 0.75), axis=1)
        position = np.arange(len(widths)) + 0.15 * (offset - 1)
        spread.errorbar(position, middle, (middle - low, high - middle), fmt="o", capsize=3, label=mode)
    spread.set_xticks(range(len(widths)), widths)
    spread.set(xlabel="width", ylabel="| ‖∇sefp‖ - ‖∇fp‖ | / mean ‖∇fp‖")
    spread.set_title("Whole model: median and quartiles over batches")
    spread.legend()

    narrowest = widths[-1]
    for mode in norms:
        found = order(result, mode, SHOWN[0], narrowest)["autocorrelation"]
        echo.plot(range(1, len(found) + 1), found, marker=".", label=mode)
    band = 1.96 / np.sqrt(result["batches"])
    echo.axhspan(-band, band, color="grey", alpha=0.2, label="white noise, 95 %")
    echo.set(xlabel="lag, batches", ylabel="autocorrelation of ranks")
    echo.set_title(f"Is it periodic? Whole model at {narrowest}")
    echo.legend()

    of_matrix = result["perturbation"]["widths"][narrowest]["matrix"]
    for offset, (name, rows) in enumerate(of_matrix.items()):
        means, deviations = np.array(rows["means"]), np.array(rows["deviations"])
        position = np.arange(len(means)) + 0.2 * (offset - 1.5)
        values.errorbar(position, means, deviations, fmt="none", alpha=0.35, color=f"C{offset}")
        error = 1.96 * deviations / np.sqrt(result["batches"])
        label = f"X: {name}" if name != "difference" else "X = 1"
        values.errorbar(position, means, error, fmt=".", color=f"C{offset}", linewidth=2.5, label=label)
    values.axhline(0, color="black", linewidth=0.8)
    values.set(xlabel="coordinate", ylabel="Y, in deviations of ∇fp")
    values.set_title(f"Fig. 6: Y at {narrowest}, mean with 95 % interval (thick)\nand deviation over batches (thin)")
    values.legend(fontsize=8, ncols=2)

    for width in widths:
        law = result["perturbation"]["widths"][width]["estimates"]["tensor"]["law"]
        label = f"{width}: slope {law['slopes']['ratio']:.2f}"
        ratio.plot(law["n"], law["ratio"], marker="o", color=colours[width], label=label)
    ideal = np.array(law["n"], dtype=float)
    ratio.plot(ideal, law["ratio"][0] / np.sqrt(ideal), "k:", label="1/√N")
    ratio.set(xlabel="N, batches added up", ylabel="‖ΣY‖ / ‖Σ∇fp‖", xscale="log", yscale="log")
    ratio.set_title("Eq. 17, X a number per tensor, whole model")
    ratio.set_ylim(bottom=ratio.get_ylim()[0] / 4)
    ratio.legend(fontsize=8, ncols=2, loc="lower center")

    for name, colour in (("perturbation", "C3"), ("gradient", "C0")):
        measured, start = np.array(law[name]), law[name][0]
        label = {"perturbation": "‖ΣY‖", "gradient": "‖Σ∇fp‖"}[name]
        growth.plot(
            law["n"], measured / start, marker="o", color=colour, label=f"{label}: slope {law['slopes'][name]:.2f}"
        )
    growth.plot(ideal, np.sqrt(ideal), "k:", label="√N")
    growth.plot(ideal, ideal, "k--", label="N")
    growth.set(xlabel="N, batches added up", ylabel="relative to N = 1", xscale="log", yscale="log")
    growth.set_title(f"What grows how: {narrowest}")
    growth.legend()
    for axis in (ratio, growth):
        axis.set_xticks(law["n"], law["n"])
        axis.minorticks_off()
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    analysis.gradient_arguments(parser, batches=200, arithmetic="tf32")
    parser.add_argument("--modes", default=",".join(MODES), help="which of still, sgd and adamw, comma-separated")
    analysis.main(parser, run, show, plot)
