"""The command ``otaro``: parses, calls, prints.

Results go to stdout, progress and remarks to stderr. What can go wrong because of the input or the machine ends in one
place, :func:`main`, as one line on stderr and exit code 2; a traceback means a bug in otaro (or OTARO_DEBUG=1).
"""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import otaro
from otaro.bench.command import BENCH_EXAMPLE, bench
from otaro.console import (
    ResultTable,
    facts_table,
    note,
    parse_size,
    progress_bar,
    results,
    shown,
    size_text,
    tolerate_any_text,
)
from otaro.errors import OtaroError, printable
from otaro.evaluate import command as evaluate_command
from otaro.generation.command import CHAT_EXAMPLE, GENERATE_EXAMPLE, chat, generate
from otaro.precision import EMBEDDING_FLOOR, WIDEST, Precision
from otaro.serve.command import SERVE_EXAMPLE, serve
from otaro.tune.command import EXAMPLE, tune

if TYPE_CHECKING:
    from otaro.checkpoint import Info

EXIT_BAD_INPUT = 2
EXIT_STOPPED = 130

app = typer.Typer(
    name="otaro",
    help="One language model, stored once, run at every precision from E5M8 (widest) to E5M3 (smallest).",
    epilog="Try it: otaro demo    What runs where, and why: python -m otaro",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

PackedFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A packed folder, as otaro pack writes it.")]
NewFolder = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist yet.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"otaro {otaro.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_BAD_INPUT)


@app.command(epilog="Example: otaro pack HuggingFaceTB/SmolLM2-135M-Instruct smollm2-packed")
def pack(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A Hugging Face model folder or name, a GGUF file, or 'smollm2' for the demo's model."
        ),
    ],
    out: NewFolder,
    precision: Annotated[
        str, typer.Option(metavar="PRECISION", help="The widest precision to keep; all below it come along.")
    ] = str(WIDEST),
    scheme: Annotated[str, typer.Option(help="How weights are rounded: nested, nearest or truncate.")] = "nested",
    group_size: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64, 128 or 256.")] = 64,
    embedding_floor: Annotated[
        str | None,
        typer.Option(
            metavar="PRECISION", help="Embeddings and output head never run below this precision; E5M4 if left out."
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Split files larger than this, such as 500MB or 5GB.")] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Pack a model: write it once, so that it can be run at every precision."""
    widest = Precision(precision)
    shard_size = parse_size(max_shard_size)
    from otaro import checkpoint
    from otaro.sefp import Format

    format = Format(scheme, group_size)  # type: ignore[arg-type]
    with progress_bar() as progress:
        packed = checkpoint.pack(
            model,
            out,
            precision=widest,
            format=format,
            embedding_floor=embedding_floor or EMBEDDING_FLOOR,
            max_shard_size=shard_size,
            progress=progress,
        )
    show_info(packed, as_json)


app.command("tune", epilog=EXAMPLE)(tune)


@app.command(epilog="Example: otaro info smollm2-packed")
def info(
    folder: PackedFolder,
    as_json: AsJson = False,
) -> None:
    """Show what a packed folder holds, and what each precision reads of it."""
    from otaro import checkpoint

    show_info(checkpoint.inspect(folder), as_json)


@app.command(epilog="Example: otaro verify smollm2-packed")
def verify(
    folder: PackedFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a sentence.")] = False,
) -> None:
    """Check every byte of a packed folder's weight files against their checksums."""
    from otaro import checkpoint

    with progress_bar() as progress:
        checked = checkpoint.verify(folder, progress=progress)
    if as_json:
        print(json.dumps({"folder": str(folder), "complete": True, "files": checked.files}, indent=2))
        return
    size = sum(checked.files.values())
    print(f"{folder} is complete and unaltered: {len(checked.files)} files, {size_text(size)}")


@app.command(epilog="Example: otaro cut smollm2-packed smollm2-small --precision E5M4")
def cut(
    folder: PackedFolder,
    out: NewFolder,
    precision: Annotated[str, typer.Option(metavar="PRECISION", help="The widest precision to keep.")],
    as_json: AsJson = False,
) -> None:
    """Write a smaller packed folder that ends at a lower precision."""
    widest = Precision(precision)
    from otaro import checkpoint

    with progress_bar() as progress:
        packed = checkpoint.cut(folder, out, widest, progress=progress)
    show_info(packed, as_json)


app.command("generate", epilog=GENERATE_EXAMPLE)(generate)
app.command("chat", epilog=CHAT_EXAMPLE)(chat)
app.command("serve", epilog=SERVE_EXAMPLE)(serve)
app.command("bench", epilog=BENCH_EXAMPLE)(bench)


@app.command(epilog="Example: otaro export smollm2-packed smollm2-e5m4.gguf --precision E5M4")
def export(
    folder: PackedFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write; it must not exist yet.")],
    precision: Annotated[str, typer.Option(metavar="PRECISION", help="The precision whose values to write.")],
    exact: Annotated[
        bool,
        typer.Option("--exact", help="As F16 (E5M8: F32), larger; else llama.cpp rounds activations to 8 bits."),
    ] = False,
) -> None:
    """Write a GGUF file for llama.cpp, Ollama or LM Studio with the values of a precision."""
    width = Precision(precision)
    from otaro.export import export_gguf

    with progress_bar() as progress:
        export_gguf(folder, out, width, progress, note, exact=exact)
    print(f"{out} holds {folder} at {width}: {size_text(out.stat().st_size)}")


app.command("eval", epilog=evaluate_command.EXAMPLE)(evaluate_command.evaluate)


@app.command(epilog="Example: otaro demo --out smollm2-packed")
def demo(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Pack into this folder and leave it; a temporary one if left out."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the temporary folder behind.")] = False,
) -> None:
    """Tune and pack a small model, then show what each precision gives: perplexity, an answer, speed."""
    from otaro.demo import run

    run(out, keep=keep)


def show_info(packed: Info, as_json: bool) -> None:
    if as_json:
        print(json.dumps(packed.to_json(), indent=2))
        return
    console = results()
    facts = facts_table()
    facts.add_row("folder", shown(str(packed.folder)))
    facts.add_row("architecture", shown(printable(packed.architecture)))
    facts.add_row("packed from", shown(printable(packed.source)))
    facts.add_row("scheme", f"{packed.format.scheme}, groups of {packed.format.group_size}")
    facts.add_row("embeddings", f"never below {packed.embedding_floor}")
    facts.add_row("parameters", f"{packed.parameters:,}, of which {packed.packed_parameters:,} packed")
    facts.add_row("clamped groups", f"{packed.clamped_groups:,}")
    console.print(facts)
    console.print()
    table = ResultTable("precision", "bits per weight", "size")
    for precision in packed.precisions:
        table.add_row(str(precision), f"{packed.bits_per_weight(precision):.2f}", size_text(packed.size(precision)))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; foreseen failures are told in one line."""
    debug = os.environ.get("OTARO_DEBUG", "") not in ("", "0")
    tolerate_any_text()
    with warnings.catch_warnings():
        quieten_libraries()
        try:
            code = typer.main.get_command(app).main(arguments, prog_name="otaro", standalone_mode=False) or 0
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read our output has had enough of it; nothing is left to say, not even at interpreter exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except MemoryError:
            if debug:
                raise
            note("otaro: error: there is not enough memory: choose a smaller context or a lower precision")
            return EXIT_BAD_INPUT
        except (OtaroError, OSError, typer.TyperException, KeyboardInterrupt) as error:
            if debug and not isinstance(error, typer.TyperException):
                raise
            if isinstance(error, KeyboardInterrupt):
                code = EXIT_STOPPED
            else:
                note(f"otaro: error: {sentence(error)}")
                return EXIT_BAD_INPUT
    if code == EXIT_STOPPED:
        note("otaro: stopped")
    return int(code)


def sentence(error: OtaroError | OSError | typer.TyperException) -> str:
    """An error in one line."""
    if isinstance(error, typer.TyperException):
        text = error.format_message()
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        if error.errno == errno.ENOSPC:
            text += "; free some space or choose another folder"
    else:
        text = str(error)
    return printable(" ".join(text.split()))


def quieten_libraries() -> None:
    """No chatter from the libraries underneath; otaro's own warnings stay, one line each."""
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", message="otaro: ")
    warnings.showwarning = lambda message, *_: note(str(message))


if __name__ == "__main__":
    sys.exit(main())
