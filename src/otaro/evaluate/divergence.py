"""A text at every width: perplexity, and how far each width strays from a reference.

The KL divergence KL(P‖Q) = Σ p·ln(p/q) says how many nats a width's distribution Q of the next token loses against the
reference's P. Perplexity sees only the token that came; the divergence sees all of them, so it shows damage that
perplexity hides where one error mends another. It needs both distributions over the whole vocabulary at once, far too
much to keep for a text: so a window goes through all widths before the next one, the reference first.

Windows and predictions are those of :mod:`otaro.evaluate.perplexity`, and so is the perplexity, to the last digit.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

import otaro
from otaro.evaluate.model import Subject
from otaro.evaluate.parts import Parts
from otaro.evaluate.perplexity import (
    POSITIONS_PER_SLICE,
    check_window,
    exponential,
    split_windows,
    summed_cross_entropy,
)
from otaro.evaluate.results import TextFigures, Width, width_name
from otaro.model_config import check_tokens
from otaro.progress import Progress

WINDOWS_PER_PART = 8

Sums = dict[str, list[float]]
"""For each window of a part the summed loss, divergence and number of positions alike, and the seconds it took."""


def measure_text(
    subject: Subject, token_ids: Tensor, window: int, parts: Parts, progress: Progress
) -> dict[Width, TextFigures]:
    """A text given as a 1-D tensor of token ids at every width of the subject; what `parts` hold is not run again."""
    check_window(subject.backend, window)
    windows = split_windows(token_ids, window)
    check_tokens(subject.backend, int(windows.max()))
    sums: dict[Width, Sums] = {width: {} for width in subject.widths}
    for start in range(0, len(windows), WINDOWS_PER_PART):
        part = windows[start : start + WINDOWS_PER_PART]
        key = {
            "kind": "text",
            "windows": [start, *part.shape],
            "reference": width_name(subject.reference),
            "tokens": hashlib.sha256(part.numpy().tobytes()).hexdigest(),
            "model": subject.identity,
            "version": otaro.__version__,
        }
        found = {width: parts.get(**key, precision=width_name(width)) for width in subject.widths}
        missing = [width for width, value in found.items() if value is None]
        if missing:

            def on_window(done: int, start: int = start) -> None:
                progress("perplexity at every precision", start + done, len(windows))

            measured = _run(subject, part, missing, on_window)
            for width, value in measured.items():
                parts.add(value, **key, precision=width_name(width))
            found |= measured
        for width, value in found.items():
            for name, numbers in value.items():
                sums[width].setdefault(name, []).extend(numbers)
    predictions = windows.numel() - len(windows)
    return {width: _figures(value, predictions, windows.numel()) for width, value in sums.items()}


@torch.inference_mode()
def _run(subject: Subject, windows: Tensor, widths: list[Width], on_window: Callable[[int], None]) -> dict[Width, Sums]:
    """The sums of each width asked for."""
    names = ("loss", "seconds", "divergence", "same")
    result: dict[Width, Sums] = {width: {name: [] for name in names} for width in widths}
    others = [width for width in widths if width != subject.reference]
    for number, window in enumerate(windows, 1):
        sums = {width: dict.fromkeys(names, 0.0) for width in widths}
        expected = torch.empty(0)
        start = time.perf_counter()
        for first, width, logits in subject.backend.logits(window, [subject.reference, *others]):
            targets = window[first + 1 : first + 1 + len(logits)].to(logits.device)
            logits = logits[: len(targets)]  # nothing follows the last token
            loss = summed_cross_entropy(logits, targets)
            seconds = time.perf_counter() - start
            if width == subject.reference:
                expected = logits.float().log_softmax(-1)
                compared = (0.0, float(len(logits)))
            else:
                compared = _compare(expected, logits)
            if width in sums:
                for name, value in zip(names, (loss, seconds, *compared), strict=True):
                    sums[width][name] += value
            start = time.perf_counter()
        for width, values in sums.items():
            for name, value in values.items():
                result[width][name].append(value)
        on_window(number)
    return result


def _compare(expected: Tensor, logits: Tensor) -> tuple[float, float]:
    """The summed divergence from log-probabilities, and at how many positions the likeliest token is the same."""
    divergence = torch.zeros((), dtype=torch.float64, device=logits.device)
    same = torch.zeros((), dtype=torch.int64, device=logits.device)
    for start in range(0, len(logits), POSITIONS_PER_SLICE):
        part = slice(start, start + POSITIONS_PER_SLICE)
        found = logits[part].float().log_softmax(-1)
        divergence += (expected[part].exp() * (expected[part] - found)).sum(-1).double().sum()
        same += (expected[part].argmax(-1) == found.argmax(-1)).sum()
    return float(divergence), float(same)


def _figures(sums: Sums, predictions: int, tokens: int) -> TextFigures:
    cross_entropy = math.fsum(sums["loss"]) / predictions
    return TextFigures(
        perplexity=exponential(cross_entropy),
        cross_entropy=cross_entropy,
        divergence=math.fsum(sums["divergence"]) / predictions,
        same_token=sum(sums["same"]) / predictions,
        tokens_per_second=tokens / sum(sums["seconds"]),
    )
