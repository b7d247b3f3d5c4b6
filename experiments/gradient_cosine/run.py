"""How much the gradients at different widths agree (the paper's Fig. 4), for every layer and every kind of projection.

    python -m experiments.gradient_cosine.run --text wiki.train.tokens --json FILE [--plot FILE]
    python -m experiments.gradient_cosine.run --text wiki.train.tokens --quick               # on a CPU
    python -m experiments.gradient_cosine.run --show FILE --plot FILE                        # draw an earlier run

The same batch goes through the untuned model at full precision and at all six widths; cosines are taken tensor by
tensor between every two of the seven gradients and averaged over batches. Products are in float32 without TF32,
cosines in float64: at E5M8 they differ from 1 by little, so rounding has to stay far below that. How far it stays below
is measured: `floor` is 1 - cosine of the full-precision gradient and itself, the batch's sequences in reverse order.

The paper's claim, "a width agrees more with the higher ones", is checked per tensor and batch. Beside it stands the
plainest explanation: if the gradient at each width were the true one plus an error of its own, unrelated to the errors
of other widths, then cos(a, b) = cos(a, full)·cos(b, full), and a width would agree more with a higher one for no other
reason than that its error is smaller. `error_cosine` is the cosine between what is left of two gradients once the
full-precision direction is taken out: 0 if they share nothing else, 1 if their errors point the same way.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import analysis, common
from otaro.evaluate.results import Width, width_name
from otaro.precision import Precision

WIDTHS: list[Width] = [None, *Precision]
NAMES = [width_name(width) for width in WIDTHS]
PAIRS = [(a, b) for a in range(len(WIDTHS)) for b in range(a + 1, len(WIDTHS))]


def products(gradients: list[list[Tensor]]) -> Tensor:
    """Inner products of all pairs of gradients, for each weight: [weights, widths, widths] in float64."""
    result = []
    for same_weight in zip(*gradients, strict=True):
        stack = torch.stack([gradient.flatten() for gradient in same_weight]).double()
        result.append(stack @ stack.T)
    return torch.stack(result).cpu()


def cosines(products: np.ndarray) -> np.ndarray:
    length = np.sqrt(np.diagonal(products, axis1=-2, axis2=-1))
    return products / (length[..., :, None] * length[..., None, :])


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.quick:
        arguments.batches, arguments.batch, arguments.length = 2, 1, 128
    gradients, device = analysis.load(arguments)
    names = gradients.targets()
    tokens = common.tokens_of(Path(arguments.text), arguments.model)
    batches = analysis.Batches(tokens, arguments.batches, arguments.batch, arguments.length, arguments.seed)
    result: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "format": dataclasses.asdict(gradients.format),
        "batch": arguments.batch,
        "sequence": arguments.length,
        "seed": arguments.seed,
        "arithmetic": arguments.arithmetic,
        "machine": common.machine(),
    }
    measured: list[np.ndarray] = []
    losses: list[list[float]] = []
    floors: list[float] = []
    started = time.perf_counter()
    for index in range(len(batches)):
        batch = batches[index].to(device)
        at_widths: list[list[Tensor]] = []
        losses.append([])
        for width in WIDTHS:
            losses[-1].append(float(gradients(batch, width)))
            at_widths.append([gradients.parameters[name].grad for name in names])  # type: ignore[misc]
            gradients.model.zero_grad(set_to_none=True)
        measured.append(products(at_widths).numpy())
        if index == 0:
            gradients(batch.flip(0) if len(batch) > 1 else batch.repeat(2, 1), None)
            again = [gradients.parameters[name].grad for name in names]
            pair = products([at_widths[0], again]).sum(0).numpy()  # type: ignore[list-item]
            floors.append(float(1 - cosines(pair)[0, 1]))
        print(f"batch {index + 1} of {len(batches)}, {time.perf_counter() - started:.0f} s", flush=True)
        result.update(
            batches=index + 1,
            seconds=time.perf_counter() - started,
            loss=dict(zip(NAMES, np.mean(losses, 0).tolist(), strict=True)),
            floor=max(floors),
            **summary(np.stack(measured), names),
        )
        analysis.write(arguments.json, result)
    return result


def summary(measured: np.ndarray, names: list[str]) -> dict[str, Any]:
    """From inner products [batches, weights, widths, widths]."""
    places = [analysis.place(name) for name in names]
    kinds = list(dict.fromkeys(kind for _, kind in places))
    layers = sorted({layer for layer, _ in places if layer is not None})
    each = cosines(measured)
    mean = each.mean(0)
    whole = cosines(measured.sum(1))
    of_kind = {kind: [index for index, (_, other) in enumerate(places) if other == kind] for kind in kinds}
    by_layer: dict[str, dict[str, list[float | None]]] = {}
    for a, b in PAIRS:
        by_layer[f"{NAMES[a]} {NAMES[b]}"] = {
            kind: [float(mean[index, a, b]) for index in of_kind[kind]] for kind in kinds if len(of_kind[kind]) > 1
        }
    return {
        "widths": NAMES,
        "layers": layers,
        "model_cosine": whole.mean(0),
        "model_cosine_deviation": whole.std(0, ddof=1) if len(whole) > 1 else None,
        "kind_cosine": {kind: mean[of_kind[kind]].mean(0) for kind in kinds},
        "layer_cosine": by_layer,
        "claim": {"all": claim(each), **{kind: claim(each[:, of_kind[kind]]) for kind in kinds}},
        "error_cosine": error_cosine(whole.mean(0)),
        "weights": len(names),
    }


def claim(each: np.ndarray) -> dict[str, dict[str, float]]:
    """For every width with neighbours on both sides, how often it agrees more with higher ones, batch by batch."""
    found = {}
    for index in range(2, len(NAMES) - 1):
        higher, lower = each[..., index, 1:index], each[..., index, index + 1 :]
        found[NAMES[index]] = {
            "next_higher_over_next_lower": float((higher[..., -1] > lower[..., 0]).mean()),
            "every_higher_over_every_lower": float((higher.min(-1) > lower.max(-1)).mean()),
            "nearest_is_closest": float((higher[..., -1] >= higher.max(-1)).mean()),
        }
    return found


def error_cosine(cosine: np.ndarray) -> dict[str, float]:
    """The cosine of two widths' gradients, the direction of the full-precision gradient taken out of both."""
    left = np.sqrt(1 - cosine[0] ** 2)
    return {
        f"{NAMES[a]} {NAMES[b]}": float((cosine[a, b] - cosine[0, a] * cosine[0, b]) / (left[a] * left[b]))
        for a, b in PAIRS
        if a > 0
    }


def show(result: dict[str, Any]) -> None:
    names = result["widths"]
    print(f"\nmean cosine over {result['batches']} batches, whole model (rounding: 1 - {result['floor']:.1g})\n")
    print(f"| | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for name, row in zip(names, result["model_cosine"], strict=True):
        print(f"| {name} | {' | '.join(f'{value:.4f}' for value in row)} |")
    print(f"\n| cosine with full precision | {' | '.join(names[1:])} |")
    print("|---" * len(names) + "|")
    for kind, matrix in result["kind_cosine"].items():
        print(f"| {kind} | {' | '.join(f'{value:.4f}' for value in matrix[0][1:])} |")
    print("\n| share of weights and batches where | " + " | ".join(result["claim"]["all"]) + " |")
    print("|---" * (len(result["claim"]["all"]) + 1) + "|")
    for key in next(iter(result["claim"]["all"].values())):
        values = (f"{checks[key]:.3f}" for checks in result["claim"]["all"].values())
        print(f"| {key.replace('_', ' ')} | {' | '.join(values)} |")
    errors = ", ".join(f"{pair} {value:.2f}" for pair, value in result["error_cosine"].items())
    print(f"\ncosine of the errors of two widths: {errors}")


def plot(result: dict[str, Any], file: Path) -> None:
    names = result["widths"]
    figure, axes = analysis.figure(2, 2, (13, 10.5))
    cosine = np.array(result["model_cosine"])
    matrix, curves, depth, kinds = axes.flat

    image = matrix.imshow(cosine, vmin=min(cosine.min(), 0.9), vmax=1, cmap="viridis")
    matrix.set_xticks(range(len(names)), names)
    matrix.set_yticks(range(len(names)), names)
    middle = (image.norm.vmin + 1) / 2
    for row in range(len(names)):
        for column in range(len(names)):
            colour = "white" if cosine[row, column] < middle else "black"
            matrix.text(column, row, f"{cosine[row, column]:.3f}", ha="center", va="center", color=colour, fontsize=9)
    matrix.set_title(f"Whole model, mean of {result['batches']} batches")
    figure.colorbar(image, ax=matrix, label="cosine of gradients", shrink=0.85)

    for colour, name, row in zip(analysis.colours(len(names)), names, cosine, strict=True):
        curves.plot(names, np.where(row > 1 - 1e-12, np.nan, row), marker="o", color=colour, label=name)
    curves.set_xlabel("compared with the gradient at")
    curves.set_ylabel("cosine")
    curves.set_title(f"Each width against all others (rounding: {result['floor']:.0e} below 1)")
    curves.legend(fontsize=8, title="gradient at")
    curves.grid(alpha=0.3)

    narrowest = result["layer_cosine"][f"{names[0]} {names[-1]}"]
    for kind, values in narrowest.items():
        depth.plot(result["layers"], values, marker=".", label=kind)
    depth.set_xlabel("layer")
    depth.set_ylabel("cosine")
    depth.set_title(f"{names[-1]} against full precision, by layer and projection")
    depth.legend(fontsize=8, ncols=2)
    depth.grid(alpha=0.3)

    for kind in [*narrowest, *(kind for kind in result["kind_cosine"] if kind not in narrowest)]:
        kinds.plot(names[1:], 1 - np.array(result["kind_cosine"][kind])[0, 1:], marker="o", label=kind)
    kinds.set_yscale("log")
    kinds.set_xlabel("width")
    kinds.set_ylabel("1 - cosine with full precision")
    kinds.set_title("By kind of weight, mean over layers")
    kinds.legend(fontsize=8, ncols=2)
    kinds.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    analysis.gradient_arguments(parser, batches=16, arithmetic="float32")
    analysis.main(parser, run, show, plot)
