"""The loss of a narrow width that learns from data and from a wider width's predictions, with its gradient at once.

For a token with logits v, a target and a teacher's logits t the loss is `labels` × cross entropy + `taught` ×
KL(softmax t ‖ softmax v), whose gradient is known in closed form:

    (labels + taught)·softmax(v) - labels·onehot(target) - taught·softmax(t)

Autograd would keep several copies of logits in float32, which for a small model with a large vocabulary are the largest
tensors of a step. Here the gradient is made in the same pass as the loss, in the type of the logits, a part of the
tokens at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otaro.tune.data import IGNORED

ROWS = 256


def loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    teacher: Tensor | None,
    labels: float,
    taught: float,
    count: Tensor,
    followed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, cross entropy and gradient: sums over the tokens whose target is not IGNORED, divided by `count`.

    `logits` and `teacher` are [tokens, vocabulary], `targets` [tokens], `count` is a number. The teacher is followed
    where the mask `followed` [tokens] says so, and without one where there is a target.
    """
    values = logits.float()
    counted = (targets != IGNORED)[:, None] / count
    followed = counted if followed is None else followed[:, None] / count
    wanted = targets.clamp(min=0)[:, None]
    log_total = values.logsumexp(-1, keepdim=True)
    cross_entropy = ((log_total - values.gather(1, wanted)) * counted).sum()
    gradient = (values - log_total).exp_().mul_(labels * counted + taught * followed)
    loss = labels * cross_entropy
    if teacher is not None and taught:
        log_teacher = teacher.float().log_softmax(-1)
        share = log_teacher.exp()
        gradient.sub_(share * followed, alpha=taught)
        divergence = log_teacher.sub_(values).mul_(share).sum(-1, keepdim=True) + log_total
        loss = loss + taught * (divergence * followed).sum()
    gradient.scatter_add_(1, wanted, -labels * counted)
    return loss, cross_entropy, gradient.to(logits.dtype)


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, teacher: Tensor, distillation: float
    ) -> tuple[Tensor, Tensor]:
        one = torch.ones((), device=logits.device)
        gradient = torch.empty_like(logits)
        loss = cross_entropy = torch.zeros((), device=logits.device)
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            found, entropy, gradient[rows] = loss_and_gradient(
                logits[rows], targets[rows], teacher[rows], 1 - distillation, distillation, one
            )
            loss, cross_entropy = loss + found, cross_entropy + entropy
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy)
        return loss, cross_entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None


def distilled_loss(logits: Tensor, teacher: Tensor, labels: Tensor, distillation: float) -> tuple[Tensor, Tensor]:
    """What a narrow width learns from, and its cross entropy: sums over the predicted tokens.

    `distillation` is the share of the KL divergence from the teacher's predictions, the rest is the cross entropy.
    """
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    result: tuple[Tensor, Tensor] = _Distilled.apply(logits.flatten(0, 1), targets, teacher.flatten(0, 1), distillation)  # type: ignore[no-untyped-call]
    return result
