"""Picking tokens on a device: what `csrc/sampling.cpp` does, in operations that can be captured.

The random number of a token is the same as there, by seed and position, and so is the order in which tokens are drawn:
that of the vocabulary. From equal logits both pick the same token, but for sums that are rounded differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STEP = 0x9E3779B97F4A7C15
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-30, 1e30
NONE = -1
"""Instead of a token, where logits are not finite."""


def signed(word: int) -> int:
    """64 bits as torch has them."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted(word: Tensor, count: int) -> Tensor:
    """To the right, zeros coming in."""
    return (word >> count) & ((1 << (64 - count)) - 1)


def _mixed(word: Tensor) -> Tensor:
    word = (word ^ _shifted(word, 30)) * signed(_MIX[0])
    word = (word ^ _shifted(word, 27)) * signed(_MIX[1])
    return word ^ _shifted(word, 31)


def random_numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """From 0 to below 1, for each seed and position: splitmix64."""
    start = _mixed(seeds + signed(_STEP))
    bits = _mixed(start + (positions + 1) * signed(_STEP))
    return _shifted(bits, 11).double() * 2.0**-53


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, `NONE` where there is none."""
    largest, token = logits.max(-1)
    return torch.where(largest - largest == 0, token, NONE)


def drawn(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """A token of each row by its settings; `positions` are those of the tokens that are picked."""
    logits = logits.float()
    best = greedy(logits)
    vocabulary = logits.shape[-1]
    most = torch.where(top_k > 0, top_k, vocabulary)[:, None]
    scale = (1 / temperature.clamp(_LEAST_TEMPERATURE, _MOST_TEMPERATURE)).float()
    ordered, place = logits.sort(dim=-1, descending=True, stable=True)
    weight = ((ordered - ordered[:, :1]) * scale[:, None]).exp()
    kept = weight.double() * (torch.arange(vocabulary, device=logits.device) < most)
    total = kept.cumsum(-1)
    # Up to the one with which the sum reaches the share.
    within = (total - kept < top_p[:, None] * total[:, -1:]) | (top_p[:, None] >= 1)
    kept = kept * within * (weight >= min_p[:, None].float())
    by_place = torch.zeros_like(kept).scatter_(-1, place, kept).cumsum(-1)
    left = random_numbers(seeds, positions)[:, None] * by_place[:, -1:]
    token = (by_place <= left).sum(-1).clamp(max=vocabulary - 1)
    return torch.where((temperature == 0) | (top_k == 1) | (best == NONE), best, token)


def penalized(logits: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """A row of logits in which tokens that are there already are less likely; `tokens` are different ones."""
    result = logits.float().clone()
    value = result[tokens]
    most = torch.finfo(torch.float32).max
    result[tokens] = torch.where(value > 0, value / penalty, value * penalty).clamp(-most, most)
    return result
