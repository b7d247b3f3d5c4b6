"""The loss of a narrow width that learns from data and from a wider width's predictions, with its gradient at once.

For a token with logits v, a target and a teacher's logits t the loss is `labels` × cross entropy + `taught` ×
KL(softmax t ‖ softmax v), whose gradient is known in closed form:

    (labels + taught)·softmax(v) - labels·onehot(target) - taught·softmax(t)

Of a prompt the teacher's predictions are learned, not the text: there `labels` is 0.

Autograd would keep several copies of logits in float32, which for a small model with a large vocabulary are the largest
tensors of a step. Here the gradient is made in the same pass as the loss, in the type of the logits, a part of the
tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from otaro.tune.data import IGNORED

ROWS = 256
Kernel = Callable[..., tuple[Tensor, Tensor, Tensor]]


def loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    teacher: Tensor | None,
    labels: float,
    taught: float,
    count: Tensor,
    prompt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, cross entropy and gradient: sums over the tokens whose target is not IGNORED, divided by `count`.

    `logits` and `teacher` are [tokens, vocabulary], `targets` [tokens], `count` is a number. Where `prompt`
    [tokens] is true, `labels` is taken as 0; the cross entropy is that of all tokens.
    """
    values = logits.float()
    counted = (targets != IGNORED)[:, None] / count
    learned = labels * (counted if prompt is None else counted * ~prompt[:, None])
    wanted = targets.clamp(min=0)[:, None]
    log_total = values.logsumexp(-1, keepdim=True)
    entropy = log_total - values.gather(1, wanted)
    gradient = (values - log_total).exp_()
    loss = (entropy * learned).sum()
    if teacher is not None and taught:
        log_teacher = teacher.float().log_softmax(-1)
        share = log_teacher.exp()
        divergence = log_teacher.sub_(values).mul_(share).sum(-1, keepdim=True) + log_total
        loss = loss + taught * (divergence * counted).sum()
        gradient.mul_(learned + taught * counted).sub_(share.mul_(taught * counted))
    else:
        gradient.mul_(learned)
    gradient.scatter_add_(1, wanted, -learned)
    return loss, (entropy * counted).sum(), gradient.to(logits.dtype)


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        teacher: Tensor,
        distillation: float,
        prompt: Tensor | None,
        kernel: Kernel,
    ) -> tuple[Tensor, Tensor]:
        one = torch.ones((), device=logits.device)
        gradient = torch.empty_like(logits)
        loss = cross_entropy = torch.zeros((), device=logits.device)
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            asked = None if prompt is None else prompt[rows]
            part, entropy, gradient[rows] = kernel(
                logits[rows], targets[rows], teacher[rows], 1 - distillation, distillation, one, asked
            )
            loss, cross_entropy = loss + part, cross_entropy + entropy
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy)
        return loss, cross_entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None, None, None


def distilled_loss(
    logits: Tensor,
    teacher: Tensor,
    labels: Tensor,
    distillation: float,
    prompt: Tensor | None = None,
    kernel: Kernel = loss_and_gradient,
) -> tuple[Tensor, Tensor]:
    """What a narrow width learns from, and its cross entropy: sums over the predicted tokens.

    `distillation` is the share of the KL divergence from the teacher's predictions, the rest is the cross entropy.
    Where `prompt` is true only the former counts. `kernel` is :func:`loss_and_gradient`, compiled or not.
    """
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    asked = None if prompt is None else torch.nn.functional.pad(prompt[:, 1:], (0, 1)).flatten()
    inputs = (logits.flatten(0, 1), targets, teacher.flatten(0, 1), distillation, asked, kernel)
    result: tuple[Tensor, Tensor] = _Distilled.apply(*inputs)  # type: ignore[no-untyped-call]
    return result
