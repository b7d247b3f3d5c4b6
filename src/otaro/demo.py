"""The main job from end to end, on a model that comes with the demo's installation: pack, evaluate, answer, compare.

Nothing is downloaded. The text is CPython's language reference, which every Python carries for its ``help()``; a fixed
slice of it, so that two runs on the same Python give the same perplexities.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from pydoc_data.topics import topics

from rich.console import Console
from rich.markup import escape

import otaro
from otaro.console import note, progress_bar, results, size_text
from otaro.evaluate import report
from otaro.evaluate.perplexity import perplexity_at_widths, text_tokens
from otaro.generate import generate, load_tokenizer
from otaro.precision import NARROWEST, WIDEST, Precision

MODEL = "smollm2"
WINDOW = 512
WINDOWS = 8
PROMPT = "What is the capital of France, and what is it known for?"
ANSWER_TOKENS = 64
SPEED_TOKENS = 24


def language_reference() -> str:
    """The topics of Python's ``help()``, in the order of their names."""
    return "\n".join(topics[name] for name in sorted(topics))


def run(out: Path | None = None, *, keep: bool = False) -> list[report.Row]:
    """Run the demo and print it. The packed model stays in `out`, or in its temporary folder if `keep` says so."""
    console = results()
    with ExitStack() as stack:
        if out is None and keep:
            out = Path(tempfile.mkdtemp(prefix="otaro-demo-")) / "packed"
        elif out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="otaro-demo-"))) / "packed"
        else:
            keep = True
        rows = _run(out, console)
    if keep:
        note(f"The packed model is in {out}: try otaro generate {out} --prompt 'Tell me a story' --precision E5M4")
    return rows


def _run(folder: Path, console: Console) -> list[report.Row]:
    console.print(f"[bold]1. Pack {MODEL} once, for every precision[/bold]")
    with progress_bar() as progress:
        info = otaro.pack(MODEL, folder, progress=progress)
    console.print(escape(f"   {info.parameters:,} parameters from {info.source}: {size_text(info.size(WIDEST))}"))

    console.print(f"[bold]2. Perplexity on Python's language reference, {WINDOWS} windows of {WINDOW} tokens[/bold]")
    with progress_bar() as progress:
        model = otaro.load(folder, WIDEST, progress=progress)
    tokenizer = load_tokenizer(folder)
    tokens = text_tokens(tokenizer, language_reference())[: WINDOWS * WINDOW]
    with progress_bar() as progress:
        measured = perplexity_at_widths(model, tokens, list(Precision), window=WINDOW, progress=progress)
    console.print("   " + ", ".join(f"{width.precision} {width.result.perplexity:.2f}" for width in measured))

    console.print("[bold]3. The same model, switched from one precision to the next, answers[/bold]")
    console.print(f"   {PROMPT}")

    def write(text: str) -> None:
        console.print(text.replace("\n", " "), end="", markup=False, soft_wrap=True)

    speeds = {}
    for precision in Precision:
        with model.at_precision(precision):
            if precision in (WIDEST, NARROWEST):
                write(f"   {precision}: ")
                answer = generate(model, tokenizer, PROMPT, max_new_tokens=ANSWER_TOKENS, on_text=write)
                console.print()
            else:
                note(f"   measuring the speed of {precision}")
                answer = generate(model, tokenizer, PROMPT, max_new_tokens=SPEED_TOKENS)
        speeds[precision] = answer.tokens_per_second

    console.print("[bold]4. What each precision costs and gives[/bold]")
    rows = [
        report.Row(
            width.precision,
            info.bits_per_weight(width.precision),
            info.size(width.precision),
            width.result.perplexity,
            speeds[width.precision],
        )
        for width in measured
    ]
    console.print(report.table(rows, speed="tokens/s (generation)"))
    return rows
