"""How far a width's predictions are from a teacher's, with the gradient at once.

For a token with logits v and a teacher's logits t that is KL(softmax t ‖ softmax v), whose gradient is
softmax(v) - softmax(t). It is made in the same pass as the loss, in the type of the logits, a part of the tokens at a
time: autograd would keep several copies of logits in float32, for a small model the largest tensors of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from otaro.tune.data import IGNORED

ROWS = 256
Kernel = Callable[..., tuple[Tensor, Tensor, Tensor]]


def loss_and_gradient(logits: Tensor, targets: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence, cross entropy and the former's gradient: sums over the tokens whose target is not IGNORED.

    `logits` and `teacher` are [tokens, vocabulary], `targets` [tokens].
    """
    values, log_teacher = logits.float().log_softmax(-1), teacher.float().log_softmax(-1)
    counted = (targets != IGNORED)[:, None]
    entropy = -values.gather(1, targets.clamp(min=0)[:, None])
    share = log_teacher.exp()
    loss = ((log_teacher - values) * share).sum(-1, keepdim=True)
    gradient = (values.exp() - share) * counted
    return (loss * counted).sum(), (entropy * counted).sum(), gradient.to(logits.dtype)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, teacher: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(logits)
        loss = cross_entropy = torch.zeros((), device=logits.device)
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            part, entropy, gradient[rows] = kernel(logits[rows], targets[rows], teacher[rows])
            loss, cross_entropy = loss + part, cross_entropy + entropy
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy)
        return loss, cross_entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None


def divergence(
    logits: Tensor, teacher: Tensor, labels: Tensor, kernel: Kernel = loss_and_gradient
) -> tuple[Tensor, Tensor]:
    """The KL divergence from the teacher's predictions, and the cross entropy: sums over the predicted tokens.

    `kernel` is :func:`loss_and_gradient`, compiled or not.
    """
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    inputs = (logits.flatten(0, 1), targets, teacher.flatten(0, 1), kernel)
    result: tuple[Tensor, Tensor] = _Divergence.apply(*inputs)  # type: ignore[no-untyped-call]
    return result
