"""The command ``otaro bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otaro.console import ResultTable, check_outputs, print_tables, progress_bar, size_text
from otaro.errors import OtaroError
from otaro.generation.command import Device
from otaro.precision import parse_precisions

if TYPE_CHECKING:
    from otaro.bench.measure import Figures, Row
    from otaro.bench.speculation import SpeculationRow

BENCH_EXAMPLE = "Example: otaro bench smollm2-packed --threads 2 --against llama.cpp"


def bench(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A packed folder, as otaro pack writes it.")],
    against: Annotated[
        str | None, typer.Option(help="'llama.cpp': also run each precision's GGUF twin in llama-cpp-python.")
    ] = None,
    precisions: Annotated[str, typer.Option(help="'all', or names with commas between them.")] = "all",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, taking turns.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="All processors if left out.")] = None,
    kv_cache: Annotated[
        str, typer.Option(metavar="FORMAT", help="How keys and values are kept: float16, or codes such as E5M8.")
    ] = "float16",
    device: Device = "cpu",
    speculation: Annotated[bool, typer.Option(help="Measure drafting by E5M3 as well.")] = True,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the figures as JSON; '-' is stdout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT", help="Draw decoding speed (.png, .svg, .pdf).")] = None,
) -> None:
    """Measure speed, memory and loading at each precision."""
    if against not in (None, "llama.cpp"):
        raise OtaroError(f"there is nothing called {against} to measure against: only llama.cpp")
    if against is not None and device != "cpu":
        raise OtaroError("llama.cpp is measured on the CPU: leave --device or --against out")
    from otaro import checkpoint
    from otaro.bench.measure import measure
    from otaro.engine.architecture import UnsupportedError
    from otaro.figure_file import check_plot
    from otaro.json_file import write_json

    check_outputs([None if json_out == Path("-") else json_out, plot])
    if plot is not None:
        check_plot(plot)
    chosen = parse_precisions(precisions, checkpoint.inspect(folder).precisions)
    try:
        with progress_bar() as progress:
            measured = measure(
                folder,
                chosen,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                rounds=rounds,
                threads=threads,
                kv_cache=kv_cache,
                device=device,
                against_llama_cpp=against is not None,
                speculation=speculation,
                progress=progress,
            )
    except UnsupportedError as error:
        raise OtaroError(f"{folder} cannot be measured: {error}") from error
    figures: dict[str, Any] = {
        "folder": folder.resolve().name,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "kv_cache": kv_cache,
        **measured.to_json(),
    }
    if json_out == Path("-"):
        print(json.dumps(figures, indent=2))
    else:
        tables = [_table(measured)]
        if against is not None:
            tables.append(_comparison(measured.rows))
        if measured.speculation:
            tables.append(_speculation(measured.speculation))
        print_tables(tables)
        if json_out is not None:
            write_json(figures, json_out)
    if plot is not None:
        _plot(measured.rows, plot)


def _table(measured: Figures) -> ResultTable:
    machine = measured.machine
    bandwidth = f"{machine['read_bytes_per_second'] / 1e9:.1f} GB/s"
    where = f"{machine['processor']}, {machine['instruction_set']}, {machine['threads']} threads reading {bandwidth}"
    if "gpu" in machine:
        where = f"{machine['gpu']}, reading {bandwidth}"
    speeds = ("first token, s", "prefill tok/s", "decode tok/s", "of bandwidth")
    table = ResultTable("precision", "bits", "weights", "cache", "load, s", *speeds, caption=where)
    for row in measured.rows:
        table.add_row(
            str(row.precision),
            f"{row.bits_per_weight:.2f}",
            size_text(row.weight_bytes),
            size_text(row.cache_bytes),
            f"{row.load_seconds:.2f}",
            f"{row.speed.first_token_seconds:.2f}",
            f"{row.speed.prefill:.0f}",
            f"{row.speed.decode:.1f}",
            f"{row.bandwidth_share:.0%}",
        )
    return table


def _speculation(rows: list[SpeculationRow]) -> ResultTable:
    headings = ("plain tok/s", "speculative tok/s", "faster", "guesses right", "tokens a check")
    table = ResultTable("speculation", "text", *headings, left=2)
    for row in rows:
        gain = f"× {row.speculative / row.plain:.2f}"
        figures = (f"{row.plain:.1f}", f"{row.speculative:.1f}", gain, f"{row.acceptance:.0%}")
        table.add_row(f"{row.precision}, {row.draft} drafts", row.text, *figures, f"{row.tokens_per_check:.2f}")
    return table


def _comparison(rows: list[Row]) -> ResultTable:
    speeds = ("prefill tok/s", "decode tok/s", "otaro's prefill", "otaro's decode")
    table = ResultTable("precision", "twin in llama.cpp", *speeds, left=2)
    for row in rows:
        if row.peer is not None:
            prefill, decode = row.speed.prefill / row.peer.prefill, row.speed.decode / row.peer.decode
            figures = (f"{row.peer.prefill:.0f}", f"{row.peer.decode:.1f}", f"× {prefill:.2f}", f"× {decode:.2f}")
            table.add_row(str(row.precision), row.peer_type or "", *figures)
    return table


def _plot(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    from otaro.evaluate.plots import label_widths
    from otaro.figure_file import save_figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    bits = [row.bits_per_weight for row in rows]
    axes.plot(bits, [row.speed.decode for row in rows], "o-", label="otaro")
    if rows[0].peer is not None:
        axes.plot(
            bits, [row.peer.decode for row in rows if row.peer is not None], "s--", label="llama.cpp (exact twins)"
        )
        axes.legend()
    label_widths(axes, {row.precision: row.bits_per_weight for row in rows})
    axes.set_ylabel("decoding, tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    save_figure(figure, path)
