"""A fast plain-torch tuning loop for trying ideas: many runs in one process over one compiled model.

The product's loop is `otaro.tune.trainer.OtaroTrainer`. This one exists so that an idea costs seconds on a GPU and a few
lines here, and does not leave options behind in the product when it is dropped. The parts it is made of (simulated
layers, one-launch quantising, LAA) are the product's.

An update goes through one batch in one or more passes; each pass has a width and a loss. Gradients of the passes add up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import common
import torch
from torch import Tensor, nn

from otaro import convert
from otaro.precision import Precision
from otaro.sefp import Format
from otaro.tune.delay import Apply, DelayedOptimizer
from otaro.tune.refresh import Refresher


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of an update: at a width (None: full precision), over a slice of the batch.

    The loss is `labels` × cross entropy + `teacher` × KL divergence from the update's first pass, which is not trained
    by it; the whole is weighted by `weight`.
    """

    width: Precision | None
    weight: float = 1.0
    labels: float = 1.0
    teacher: float = 0.0
    part: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True)
class Idea:
    """A tuning run to try. `plan` is told the batch's number (from 0), their count and the widths' latest losses."""

    plan: Callable[[int, int, dict[Precision | None, float]], Sequence[Pass]]
    learning_rate: float = 3e-5
    format: Format = Format()
    warm_up: float = 0.03
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    average: float = 0.0
    """The share of the run, at its end, whose weights are averaged."""
    delay: int | None = None
    delay_apply: Apply = "mean"
    normalise: bool = False
    """Give the gradient of every pass the norm of the first one's."""
    needs_losses: bool = False
    schedule: str = "cosine"
    sgd: bool = False


class Lab:
    """A model that is tuned again and again from where it started."""

    def __init__(self, model: str, device: torch.device, *, compiled: bool = True) -> None:
        torch.set_float32_matmul_precision("high")
        self.device = device
        self.model: Any = common.load_model(model, device)
        convert.simulate(self.model, Format())
        self.layers = list(convert.sefp_layers(self.model).values())
        self.original = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.half = torch.bfloat16 if device.type == "cuda" else None
        self.trained = Refresher(self.model, self.half)
        self.measured = Refresher(self.model)
        self.loss: Any = self._loss
        self.score: Any = self._score
        if compiled:
            # One graph for each use (trained, measured, with and without values); shapes never vary within one.
            torch._dynamo.config.automatic_dynamic_shapes = False
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.model.layers:
                layer.compile()
            self.loss, self.score = torch.compile(self._loss), torch.compile(self._score)

    def reset(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self.original)

    def use(self, width: Precision | None, refresh: Refresher, format: Format) -> None:
        """Compute at a width of a format from now on."""
        for layer in self.layers:
            layer.precision = width
            layer.format = format
        refresh()

    def _loss(
        self, hidden: Tensor, ids: Tensor, teacher: Tensor | None, labels: float, distilled: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.model.lm_head(hidden[:, :-1])
        values = logits.float()
        cross_entropy = nn.functional.cross_entropy(values.flatten(0, 1), ids[:, 1:].flatten())
        if teacher is None:
            return cross_entropy * labels, cross_entropy.detach(), logits
        log_teacher = teacher.float().log_softmax(-1)
        divergence = (log_teacher.exp() * (log_teacher - values.log_softmax(-1))).sum(-1).mean()
        return labels * cross_entropy + distilled * divergence, cross_entropy.detach(), logits

    def _score(self, hidden: Tensor, ids: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    def passes(self, ids: Tensor, plan: Sequence[Pass], format: Format, normalise: bool) -> dict[Any, Tensor]:
        """Leave the update's gradient in the parameters; the cross entropy of each width."""
        losses: dict[Any, Tensor] = {}
        taught: Tensor | None = None
        reference = None
        held: list[Tensor] | None = None
        for number, step in enumerate(plan):
            part = ids[step.part]
            self.use(step.width, self.trained, format)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half is not None):
                hidden = self.model.model(input_ids=part, use_cache=False).last_hidden_state
                teacher = None if step.teacher == 0 or taught is None else taught[step.part]
                loss, losses[step.width], logits = self.loss(hidden, part, teacher, step.labels, step.teacher)
            (loss * step.weight).backward()
            if number == 0 and len(plan) > 1 and any(other.teacher for other in plan):
                taught = logits.detach()
            if normalise:
                grads = [parameter.grad for parameter in self.model.parameters()]
                norm = torch.nn.utils.get_total_norm(grads)
                if held is None:
                    reference, held = norm, grads
                else:
                    torch._foreach_mul_(grads, reference / norm * step.weight)
                    torch._foreach_add_(held, grads)
                self.model.zero_grad(set_to_none=True)
        if held is not None:
            for parameter, grad in zip(self.model.parameters(), held, strict=True):
                parameter.grad = grad
        return losses

    def tune(self, idea: Idea, blocks: Tensor, steps: int, batch: int, seed: int) -> dict[str, Any]:
        """Tune from the start; returns how often each width was passed and what it took."""
        self.reset()
        self.model.train()
        torch.manual_seed(seed)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        while len(order) < steps * batch:
            order = torch.cat([order, torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed + 1))])
        parameters = list(self.model.parameters())
        inner: torch.optim.Optimizer
        if idea.sgd:
            inner = torch.optim.SGD(parameters, lr=idea.learning_rate)
        else:
            fused = self.device.type == "cuda"
            inner = torch.optim.AdamW(parameters, lr=idea.learning_rate, betas=idea.betas, weight_decay=0, fused=fused)
        ultra_low = [Precision.E5M4, Precision.E5M3]
        optimizer = inner if idea.delay is None else DelayedOptimizer(inner, ultra_low, idea.delay, idea.delay_apply)
        averaged: list[Tensor] | None = None
        count = 0
        losses: dict[Precision | None, float] = {}
        widths: dict[str, int] = {}
        started = time.perf_counter()
        for number in range(steps):
            warm = min(1.0, (number + 1) / max(1.0, idea.warm_up * steps))
            faded = 0.5 * (1 + math.cos(math.pi * number / steps)) if idea.schedule == "cosine" else 1.0
            if idea.schedule == "linear":
                faded = 1 - number / steps
            for group in inner.param_groups:
                group["lr"] = idea.learning_rate * warm * faded
            ids = blocks[order[number * batch : (number + 1) * batch].to(self.device)]
            plan = idea.plan(number, steps, losses)
            measured = self.passes(ids, plan, idea.format, idea.normalise)
            if idea.needs_losses:
                losses.update({width: float(loss) for width, loss in measured.items()})
            for step in plan:
                widths[str(step.width)] = widths.get(str(step.width), 0) + 1
            if idea.clip:
                nn.utils.clip_grad_norm_(parameters, idea.clip)
            if isinstance(optimizer, DelayedOptimizer):
                optimizer.width = plan[0].width
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if idea.average and number >= steps * (1 - idea.average):
                count += 1
                with torch.no_grad():
                    if averaged is None:
                        averaged = [parameter.clone() for parameter in parameters]
                    else:
                        torch._foreach_lerp_(averaged, parameters, 1 / count)
        if averaged is not None:
            with torch.no_grad():
                torch._foreach_copy_(parameters, averaged)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - started, "passes": widths}

    @torch.no_grad()
    def perplexity(
        self, tokens: Tensor, widths: Sequence[Precision | None], format: Format, window: int = 2048, batch: int = 16
    ) -> dict[str, float]:
        """Perplexity at widths, as `common.perplexity`, in float32 (on a GPU TF32, which holds every SEFP value)."""
        self.model.eval()
        windows = tokens[: len(tokens) // window * window].view(-1, window)
        result = {}
        for width in widths:
            self.use(width, self.measured, format)
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for chunk in windows.split(batch):
                hidden = self.model.model(input_ids=chunk, use_cache=False).last_hidden_state
                total += self.score(hidden, chunk).double()
            result["full" if width is None else str(width)] = math.exp(float(total) / (len(windows) * (window - 1)))
        return result
