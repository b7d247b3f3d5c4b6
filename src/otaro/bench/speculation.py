"""What speculation gains: the same greedy text with drafts and without, taking turns.

How many guesses hold depends on the text, so there are two kinds: answers to questions, put through the model's chat
template, and prose that goes on from a sentence.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from otaro.engine.engine import Engine
from otaro.engine.text import end_tokens
from otaro.errors import OtaroError
from otaro.precision import NARROWEST, Precision
from otaro.progress import Progress
from otaro.text import prompt_tokens

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a fox who learns to swim.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "How do I make a good cup of coffee? Give numbered steps.",
    "Summarise the causes of the First World War.",
)
SENTENCES = (
    "The castle was built in the twelfth century by a family of merchants who controlled the trade along the river.",
    "In 1863 the regiment marched north under Colonel Harris, and took part in several battles during that summer.",
    "The album was released in March 1994 and received generally positive reviews from critics, who praised its",
    "Photosynthesis is the process by which plants convert light energy into chemical energy.",
    "The river rises in the mountains of the north and flows south through a wide valley before it reaches the sea",
)


@dataclass(frozen=True)
class SpeculationRow:
    """One kind of text. Speeds in tokens per second, over all its prompts, each at the median of its rounds."""

    text: str
    precision: Precision
    draft: Precision
    plain: float
    speculative: float
    guesses: int
    acceptance: float
    tokens_per_check: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "precision": str(self.precision), "draft": str(self.draft)}


def measure_speculation(
    engine: Engine, tokenizer: Any, *, new_tokens: int, rounds: int, progress: Progress | None = None
) -> list[SpeculationRow]:
    """Plain and speculative greedy decoding at the engine's precision, drafted at the narrowest."""
    rows = []
    for place, (text, prompts, raw) in enumerate((("answers", QUESTIONS, False), ("prose", SENTENCES, True))):
        if progress is not None:
            progress("measuring speculation", place, 2)
        ids = [prompt_tokens(tokenizer, prompt, raw=raw) for prompt in prompts]
        rows.append(_measure(engine, text, ids, end_tokens(engine, tokenizer), new_tokens, rounds))
    return rows


def _measure(
    engine: Engine, text: str, prompts: Sequence[list[int]], end: list[int], new_tokens: int, rounds: int
) -> SpeculationRow:
    totals = {None: 0.0, NARROWEST: 0.0}
    tokens = checks = guesses = right = 0
    for prompt in prompts:
        seconds: dict[Precision | None, list[float]] = {draft: [] for draft in totals}
        results: dict[Precision | None, list[int]] = {}
        for _ in range(rounds):
            for draft in totals:
                made = engine.tokens(prompt, max_new_tokens=new_tokens, draft=draft, end=end)
                first = list(itertools.islice(made, 1))  # comes with the prompt, which is not measured here
                start = time.perf_counter()
                results[draft] = [*first, *made]
                seconds[draft].append(time.perf_counter() - start)
        if results[None] != results[NARROWEST]:
            raise OtaroError("speculation changed the text: the engine is broken, please report it")
        for draft in totals:
            totals[draft] += statistics.median(seconds[draft])
        counts = engine.speculation
        tokens += max(0, len(results[None]) - 1)
        checks += counts.checks
        guesses += counts.repeated + counts.drafted
        right += counts.repeated_right + counts.drafted_right
    return SpeculationRow(
        text,
        engine.precision,
        NARROWEST,
        tokens / totals[None],
        tokens / totals[NARROWEST],
        guesses,
        right / max(1, guesses),
        1 + right / max(1, checks),
    )
