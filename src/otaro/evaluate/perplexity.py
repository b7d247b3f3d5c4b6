"""Perplexity: how surprised a model is by a text, the same way at every width.

The text's tokens are cut into windows that do not overlap; a rest shorter than a window is left out, unless the text
is shorter than one window, which is then the only one. Where the model wants a token for the beginning (BOS) before a
text, each window begins with it; no other special token is added. In a window of n tokens the model predicts all but
the first from those before it, n - 1 predictions; perplexity is exp of the mean cross entropy over all predictions.
Figures are comparable only for the same text, the same tokenizer and the same window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otaro.errors import OtaroError
from otaro.model_config import check_tokens, context_length
from otaro.precision import Precision
from otaro.progress import Progress
from otaro.tokenizer import beginning, encode

LONGEST_DEFAULT_WINDOW = 2048
# Positions whose logits are widened to float32 at a time: 128 rows of a vocabulary of 128 000 are 64 MB.
POSITIONS_PER_SLICE = 128


@dataclass(frozen=True)
class PerplexityResult:
    """`cross_entropy` is the mean over `tokens` predictions, in nats."""

    perplexity: float
    cross_entropy: float
    tokens: int
    windows: int


@dataclass(frozen=True)
class WidthResult:
    """Perplexity at one width, and the tokens the model read per second meanwhile."""

    precision: Precision
    result: PerplexityResult
    tokens_per_second: float


def default_window(model: Any) -> int:
    """The model's context, at most 2048 tokens."""
    return min(context_length(model), LONGEST_DEFAULT_WINDOW)


def check_window(model: Any, window: int) -> None:
    """Refuse a window that the model cannot read."""
    if window > context_length(model):
        raise OtaroError(f"a window of {window} tokens is longer than the model's context of {context_length(model)}")


def exponential(cross_entropy: float) -> float:
    """Perplexity; exp overflows a float just above 709 nats, where no finite figure is worth printing."""
    return math.inf if cross_entropy >= 700 else math.exp(cross_entropy)


def text_tokens(tokenizer: Any, text: str, window: int, name: str = "the text") -> Tensor:
    """A text as a 1-D tensor of token ids to be cut into windows, each with the beginning that the model wants."""
    if not text.strip():
        raise OtaroError(f"{name} is empty: there is nothing to predict")
    ids, begin = encode(tokenizer, text), beginning(tokenizer)
    if window <= len(begin):
        raise OtaroError(f"a window of {window} has no room for text: choose a longer one")
    step = window - len(begin)
    laid_out = [token for start in range(0, len(ids), step) for token in (*begin, *ids[start : start + step])]
    return torch.tensor(laid_out, dtype=torch.long)


def split_windows(token_ids: Tensor, window: int) -> Tensor:
    """The text as [windows, window], the rest left out; a text shorter than a window is one short window."""
    if token_ids.dim() != 1:
        raise ValueError(f"token_ids must be one-dimensional, not of shape {list(token_ids.shape)}")
    if window < 2:
        raise OtaroError(f"a window of {window} predicts nothing: choose a window of at least 2 tokens")
    if len(token_ids) < 2:
        raise OtaroError(f"the text has {len(token_ids)} tokens: perplexity needs at least 2")
    if len(token_ids) < window:
        return token_ids[None]
    return token_ids[: len(token_ids) // window * window].view(-1, window)


@torch.inference_mode()
def perplexity(
    model: Any,
    token_ids: Tensor,
    *,
    window: int | None = None,
    batch_size: int = 1,
    progress: Progress | None = None,
    description: str = "perplexity",
) -> PerplexityResult:
    """Perplexity of a transformers causal LM on a text given as a 1-D tensor of token ids.

    `window` defaults to the model's context, at most 2048; `progress` counts windows.
    """
    window = default_window(model) if window is None else window
    check_window(model, window)
    windows = split_windows(token_ids, window)
    check_tokens(model, int(windows.max()))
    losses = []
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size].to(model.device)
        logits = model(input_ids=batch, use_cache=False).logits
        losses.append(summed_cross_entropy(logits[:, :-1], batch[:, 1:]))
        if progress is not None:
            progress(description, start + len(batch), len(windows))
    predictions = windows.numel() - len(windows)
    cross_entropy = math.fsum(losses) / predictions
    return PerplexityResult(exponential(cross_entropy), cross_entropy, predictions, len(windows))


def perplexity_at_widths(
    model: Any,
    token_ids: Tensor,
    precisions: Sequence[Precision],
    *,
    window: int | None = None,
    progress: Progress | None = None,
) -> list[WidthResult]:
    """Perplexity of one loaded packed model at each width in turn; the model's own width is restored."""
    results = []
    for precision in precisions:
        with model.at_precision(precision):
            start = time.perf_counter()
            result = perplexity(
                model, token_ids, window=window, progress=progress, description=f"perplexity at {precision}"
            )
            seconds = time.perf_counter() - start
        results.append(WidthResult(precision, result, (result.tokens + result.windows) / seconds))
    return results


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> float:
    """The sum over all predictions, [..., positions], in float64; each term in float32. Waits for the device."""
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for start in range(0, targets.shape[-1], POSITIONS_PER_SLICE):
        part = slice(start, start + POSITIONS_PER_SLICE)
        losses = torch.nn.functional.cross_entropy(
            logits[..., part, :].flatten(0, -2).float(), targets[..., part].flatten(), reduction="none"
        )
        total += losses.double().sum()
    return float(total)
