"""The main job from end to end, on a model that comes with the demo's installation: tune, pack, evaluate, answer.

Nothing is downloaded. The text is CPython's language reference, which every Python carries for its ``help()``; its end
is held back for measuring. Fixed slices of it, so that two runs on the same Python give the same perplexities.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from pydoc_data.topics import topics

from rich.console import Console
from rich.markup import escape

import otaro
from otaro.console import answer_writer, note, progress_bar, results, size_text
from otaro.engine.sampling import Sampling
from otaro.evaluate import report
from otaro.evaluate.perplexity import perplexity_at_widths, text_tokens
from otaro.generation.request import Request
from otaro.generation.runner import open_runner
from otaro.precision import NARROWEST, WIDEST, Precision
from otaro.text import prompt_tokens
from otaro.tokenizer import load_tokenizer

MODEL = "smollm2"
WINDOW = 512
WINDOWS = 4
STEPS = 12
BATCH = 2
SEQUENCE = 256
PROMPT = "What is the capital of France, and what is it known for?"
ANSWER_TOKENS = 64
SPEED_TOKENS = 32
SPEED_ROUNDS = 5


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
    text = language_reference()
    held_back = len(text) * 9 // 10
    with tempfile.TemporaryDirectory(prefix="otaro-demo-") as name:
        work = Path(name)
        console.print(f"[bold]1. {MODEL} as it is: perplexity on Python's language reference at every precision[/bold]")
        with progress_bar() as progress:
            otaro.pack(MODEL, work / "untuned", progress=progress)
        before = _measure(work / "untuned", text[held_back:], console)

        console.print(f"[bold]2. Tune once for all of them: {STEPS} steps on the rest of the text[/bold]")
        (work / "reference.txt").write_text(text[:held_back], encoding="utf-8")
        _tune(work / "tuned", work / "reference.txt")

        console.print("[bold]3. Pack the tuned model once, and measure it at every precision[/bold]")
        with progress_bar() as progress:
            info = otaro.pack(work / "tuned", folder, progress=progress)
    console.print(escape(f"   {info.parameters:,} parameters in {size_text(info.size(WIDEST))}"))
    after = _measure(folder, text[held_back:], console)

    console.print("[bold]4. The same model, switched from one precision to the next, answers[/bold]")
    console.print(f"   {PROMPT}")
    speeds = _answer(folder)

    console.print("[bold]5. What each precision costs and gives[/bold]")
    rows = [
        report.Row(width, info.bits_per_weight(width), info.size(width), after[width], speeds[width])
        for width in Precision
    ]
    console.print(report.table(rows, before=before))
    return rows


def _measure(folder: Path, text: str, console: Console) -> dict[Precision, float]:
    """Perplexity of a packed folder at every width on the beginning of a text."""
    with progress_bar() as progress:
        model = otaro.load(folder, WIDEST, progress=progress)
        tokens = text_tokens(load_tokenizer(folder), text, WINDOW)[: WINDOWS * WINDOW]
        measured = perplexity_at_widths(model, tokens, list(Precision), window=WINDOW, progress=progress)
    perplexities = {width.precision: width.result.perplexity for width in measured}
    console.print("   " + ", ".join(f"{width} {perplexity:.2f}" for width, perplexity in perplexities.items()))
    return perplexities


def _tune(out: Path, text: Path) -> None:
    from otaro.tune import command
    from otaro.tune.config import TuneArguments
    from otaro.tune.recipe import settings

    args = TuneArguments(
        **settings(),
        output_dir=f"{out}.tuning",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to="none",
        logging_steps=STEPS,
        disable_tqdm=True,
        use_cpu=True,
    )
    command.run(MODEL, out, args, [str(text)], sequence_length=SEQUENCE)


def _answer(folder: Path) -> dict[Precision, float]:
    """Answer the prompt at the widest and the narrowest width, and measure the speed of all."""
    runner = open_runner(folder, WIDEST, remark=note)
    prompt = prompt_tokens(runner.tokenizer, PROMPT)
    writer = answer_writer()
    for precision in (WIDEST, NARROWEST):
        runner.precision = precision
        writer.push(f"   {precision}: ")
        runner.generate(prompt, Request(ANSWER_TOKENS, Sampling()), lambda text: writer.push(text.replace("\n", " ")))
        writer.push("\n")
    # In rounds, and the median of each width: a machine's speed changes from one second to the next.
    speeds: dict[Precision, list[float]] = {precision: [] for precision in Precision}
    with progress_bar() as progress:
        for number in range(SPEED_ROUNDS):
            progress("measuring the speed of every precision", number, SPEED_ROUNDS)
            for precision in Precision:
                runner.precision = precision
                answer = runner.generate(prompt, Request(SPEED_TOKENS, Sampling()))
                speeds[precision].append(answer.tokens_per_second)
    return {precision: statistics.median(measured) for precision, measured in speeds.items()}
