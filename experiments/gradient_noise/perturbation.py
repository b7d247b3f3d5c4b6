"""The perturbation Y = ∇sefp - X·∇fp from gradients kept at sampled coordinates: the paper's Fig. 6 and Eq. 17.

A matrix X for all weights has more unknowns than any number of batches can determine, so there are four estimates:
X = 1 (`difference`), a number per tensor, a number per coordinate, and a full matrix on 30 coordinates of the last
layer's down projection, in sample and cross-validated over five folds. Coordinates are drawn from every tensor, their
gradients kept for all batches; sums over coordinates are weighted so that they stand for the whole model, and
`sampling` says how well norms from the sample agree with the true ones.

Is E[Y] = 0? z = mean / standard error per coordinate, over as many coordinates of every tensor: were it so, z² would
average (n - 1)/(n - 3) and 5 % would lie beyond 1.96 (a little more for few batches). Residuals of a fit are made small
by the fit, means included, and the more so the more X is free to take up: the number per tensor is the one to go by.

Eq. 17 says that ‖ΣY‖ / ‖Σ∇fp‖ falls as 1/√N. It supposes that ‖ΣY‖ grows as √N and ‖Σ∇fp‖ as N. All three are fitted,
over disjoint runs of N batches. `signal` splits both into mean and fluctuation (‖E[·]‖² without bias): a sum begins to
grow as N from about N = variance / ‖mean‖² on (`crossover`), and the ratio ends at ‖E[Y]‖ / ‖E[∇fp]‖, which is 0 only
if E[Y] is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import analysis

SIZES = (1, 2, 5, 10, 20, 50, 100)
SAMPLED = 2048
FIGURE_6 = 30
FOLDS = 5


class Sample:
    """Coordinates drawn from every tensor that goes through the format, and the weights each stands for.

    Gradients are so uneven that a plain draw misses most of a tensor's norm. Half of the draw is plain (`plain` marks
    it), half goes by the squared gradient that lies in the parameters now; `weight` makes up for both.
    """

    def __init__(self, gradients: analysis.Gradients, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.names = gradients.targets()
        self._gradients = gradients
        self._places, weights = [], []
        for name in self.names:
            squares = gradients.parameters[name].grad.flatten().double().square()  # type: ignore[union-attr]
            total = squares.cumsum(0)
            plain = torch.randint(len(squares), (SAMPLED // 2,), generator=generator).to(device)
            draw = torch.rand(SAMPLED // 2, generator=generator, dtype=torch.float64).to(device) * total[-1]
            places = torch.cat([plain, torch.searchsorted(total, draw, right=True).clamp(max=len(squares) - 1)])
            chance = 0.5 / len(squares) + 0.5 * squares[places] / total[-1]
            self._places.append(places)
            weights.append(1 / (SAMPLED * chance))
        self.weight = torch.cat(weights)
        self.tensor = torch.arange(len(self.names), device=device).repeat_interleave(SAMPLED)
        self.plain = torch.arange(len(self.tensor), device=device) % SAMPLED < SAMPLED // 2

    def take(self) -> Tensor:
        """The gradient as it now lies in the parameters, at these coordinates."""
        return torch.cat(
            [
                self._gradients.parameters[name].grad.flatten()[places]  # type: ignore[union-attr]
                for name, places in zip(self.names, self._places, strict=True)
            ]
        )


def last_down(targets: list[str]) -> str:
    """The tensor the paper looks at: the down projection of the last layer."""
    return max((name for name in targets if "down" in name), key=lambda name: analysis.place(name)[0] or 0)


def weighted(values: Tensor, weight: Tensor) -> Tensor:
    """The norm over the last dimension, each coordinate counting for the weights it stands for."""
    return (values.double().square() * weight).sum(-1).sqrt()


def perturbation(history: Tensor, sample: Sample, widths: list[str]) -> dict[str, Any]:
    """From sampled gradients [widths, batches, coordinates], full precision first."""
    full = history[0].double()
    tensors = len(sample.names)
    kinds = [analysis.place(name)[1] for name in sample.names]

    def per_tensor(values: Tensor) -> Tensor:
        return torch.zeros(tensors, dtype=values.dtype, device=values.device).index_add_(0, sample.tensor, values)

    found: dict[str, Any] = {"coordinates": full.shape[1], "gradient": signal(full, sample.weight), "widths": {}}
    found["gradient"]["z"] = z_scores(full[:, sample.plain])
    for row, width in enumerate(widths, 1):
        noisy = history[row].double()
        both, own = (noisy * full).sum(0), full.square().sum(0)
        by_tensor = per_tensor(both * sample.weight) / per_tensor(own * sample.weight)
        by_coordinate = torch.where(own > 0, both / own.clamp(min=1e-300), 0.0)
        estimates = {
            "difference": torch.ones_like(own),
            "tensor": by_tensor[sample.tensor],
            "coordinate": by_coordinate,
        }
        lines: dict[str, Any] = {
            "x": {
                kind: float(by_tensor[[index for index, other in enumerate(kinds) if other == kind]].mean())
                for kind in dict.fromkeys(kinds)
            },
            "estimates": {},
        }
        for name, scale in estimates.items():
            rest = noisy - scale * full
            size = weighted(rest, sample.weight).square().mean().sqrt()
            lines["estimates"][name] = {
                "relative_size": float(size / weighted(full, sample.weight).square().mean().sqrt()),
                "z": z_scores(rest[:, sample.plain]),
                "signal": signal(rest, sample.weight),
                "law": law(rest, full, sample.weight),
            }
            if name == "tensor":
                lines["slopes_by_kind"] = {
                    kind: law(rest[:, of_kind], full[:, of_kind], sample.weight[of_kind])["slopes"]
                    for kind in dict.fromkeys(kinds)
                    for of_kind in [torch.tensor([k == kind for k in kinds], device=full.device)[sample.tensor]]
                }
        tensor = sample.names.index(last_down(sample.names))
        chosen = ((sample.tensor == tensor) & sample.plain).nonzero().flatten()[:FIGURE_6]
        lines["matrix"] = matrix(
            noisy[:, chosen].cpu().numpy(), full[:, chosen].cpu().numpy(), float(by_tensor[tensor])
        )
        found["widths"][width] = lines
    return found


def z_scores(values: Tensor) -> dict[str, float]:
    """Mean over batches against its standard error, over all coordinates whose value varies."""
    count = len(values)
    deviation = values.std(0)
    varied = deviation > 0
    z = (values.mean(0)[varied] / deviation[varied] * count**0.5).abs()
    return {
        "mean_square": float(z.square().mean()),
        "expected_mean_square": (count - 1) / (count - 3),
        "beyond_1.96": float((z > 1.96).double().mean()),
        "beyond_3": float((z > 3).double().mean()),
    }


def signal(values: Tensor, weight: Tensor) -> dict[str, float | None]:
    """‖E[v]‖² without bias, E‖v - E[v]‖², and the N from which a sum of N grows by its mean rather than by chance."""
    variance = float((values.var(0) * weight).sum())
    mean = float(weighted(values.mean(0), weight).square()) - variance / len(values)
    return {"mean_square": mean, "variance": variance, "crossover": variance / mean if mean > 0 else None}


def law(rest: Tensor, full: Tensor, weight: Tensor) -> dict[str, Any]:
    """‖ΣY‖, ‖Σ∇fp‖ and their ratio over disjoint runs of N batches, and the slopes of their logarithms in ln N."""
    lines: dict[str, Any] = {"n": [], "perturbation": [], "gradient": [], "ratio": []}
    for size in (size for size in SIZES if 2 * size <= len(full)):
        runs = len(full) // size

        def norms(values: Tensor, runs: int = runs, size: int = size) -> Tensor:
            return weighted(values[: runs * size].view(runs, size, -1).sum(1), weight)

        above, below = norms(rest), norms(full)
        lines["n"].append(size)
        lines["perturbation"].append(float(above.mean()))
        lines["gradient"].append(float(below.mean()))
        lines["ratio"].append(float((above / below).mean()))
    lines["slopes"] = {
        name: float(np.polyfit(np.log(lines["n"]), np.log(lines[name]), 1)[0])
        for name in ("perturbation", "gradient", "ratio")
    }
    return lines


def matrix(noisy: np.ndarray, full: np.ndarray, scalar: float) -> dict[str, Any]:
    """Y on a few coordinates with a full matrix X, as in Fig. 6; everything in units of each ∇fp's own spread."""
    unit = full.std(0, ddof=1)
    noisy, full = noisy / unit, full / unit
    count, size = full.shape

    def residual(train: np.ndarray, test: np.ndarray) -> np.ndarray:
        return noisy[test] - full[test] @ np.linalg.lstsq(full[train], noisy[train], rcond=None)[0]

    fold = np.arange(count) % FOLDS
    rests = {"difference": noisy - full, "scalar": noisy - scalar * full}
    if count * (FOLDS - 1) // FOLDS > size:
        everything = np.arange(count)
        rests["matrix"] = residual(everything, everything)
        held_out = np.empty_like(full)
        for part in range(FOLDS):
            held_out[fold == part] = residual(everything[fold != part], everything[fold == part])
        rests["matrix, cross-validated"] = held_out
    return {
        name: {
            "spread": float(np.sqrt((rest.std(0, ddof=1) ** 2).mean())),
            "beyond_1.96": float((np.abs(rest.mean(0) / rest.std(0, ddof=1) * np.sqrt(count)) > 1.96).mean()),
            "means": rest.mean(0).tolist(),
            "deviations": rest.std(0, ddof=1).tolist(),
        }
        for name, rest in rests.items()
    }
