"""Every table of the documents that comes from an experiment, made from its results.

    python -m experiments.tables              # writes them into the documents
    python -m experiments.tables --check      # says which differ
    python -m experiments.tables --figures    # draws each experiment's figure.png

A table stands in a document between `<!-- table: NAME -->` and `<!-- end of table -->`. Cells are means over seeds.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from experiments.alpaca.run import difference
from otaro.evaluate.documents import TASKS
from otaro.precision import Precision

ROOT = Path(__file__).resolve().parent
DOCUMENTS = [ROOT.parent / "README.md", *sorted((ROOT.parent / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
WIDTHS = [str(precision) for precision in Precision]
Rows = list[tuple[str, list[str]]]


def read(*path: str) -> Any:
    return json.loads(ROOT.joinpath(*path).read_text(encoding="utf-8"))


def read_runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of an experiment by name, seed by seed."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        run = read(str(file))
        runs.setdefault(run["run"], []).append(run)
    return runs


def markdown(head: Iterable[str], rows: Rows) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def perplexity(runs: list[dict[str, Any]], width: str) -> str:
    return f"{statistics.mean(run['perplexity'][width] for run in runs):.2f}"


def perplexities(folder: str, rows: Mapping[str, str], *, full: bool = False, part: str = "") -> str:
    """A row for each label and run. `fixed` stands for the runs made for one width, each at that width."""
    runs = read_runs(ROOT / folder / "runs" / part)
    columns = [*WIDTHS, *(["full"] if full else [])]
    table: Rows = []
    for label, name in rows.items():
        if name in ("fixed", "fixed+averaged"):
            made = {width: runs.get(name.replace("fixed", f"fixed-{width}")) for width in columns}
            cells = [perplexity(of, width) if of else "" for width, of in made.items()]
        else:
            cells = [perplexity(runs[name], width) for width in columns]
        table.append((label, cells))
    return markdown(["run", *columns], table)


def accuracies() -> str:
    """Average accuracy on Alpaca's eight tasks, in percent, and differences in points with their standard errors."""
    runs = read_runs(ROOT / "alpaca" / "runs")
    rows = _alpaca_rows(runs, lambda measured: 100 * measured["average"]["acc"], 2)
    for label, other in {"`fp16`": "fp16+prompts", "`fixed`": "fixed+prompts"}.items():
        apart = [difference(runs["tiers"], runs[other], width, list(TASKS)) for width in WIDTHS]
        rows.append((f"`tiers` less {label}, prompts learned by both", [_points(each, 0) for each in apart]))
        rows.append(("its standard error", [_points(each, 1) for each in apart]))
    return markdown(["average accuracy, %", *WIDTHS], rows)


def _points(found: tuple[float, float | None] | None, part: int) -> str:
    value = None if found is None else found[part]
    return "" if value is None else f"{100 * value:.2f}" if part else f"{100 * value:+.2f}"


def _alpaca_rows(
    runs: Mapping[str, list[dict[str, Any]]], figure: Callable[[dict[str, Any]], float], digits: int
) -> Rows:
    """A row for each kind of run: the mean of a figure at each width that was measured."""
    rows: Rows = []
    for label, name in ALPACA.items():
        values = [[figure(run["widths"][width]) for run in runs[name] if width in run["widths"]] for width in WIDTHS]
        rows.append((label, [f"{statistics.mean(of):.{digits}f}" if of else "" for of in values]))
    return rows


def completions() -> str:
    rows = _alpaca_rows(read_runs(ROOT / "alpaca" / "runs"), lambda measured: measured["perplexity"], 3)
    return markdown(["perplexity of held-back completions", *WIDTHS], rows)


def formats(file: str, table: str, rows: Mapping[str, tuple[str, ...]], head: Iterable[str]) -> str:
    """Rows of a result of `experiments.format`, each with the label and further cells before the figures."""
    lines = read("format", file)["tables"][table]
    cells = {name: [f"{lines[name][width]:.2f}" for width in WIDTHS] for name in rows}
    return markdown([*head, *WIDTHS], [(label[0], [*label[1:], *cells[name]]) for name, label in rows.items()])


def candidates() -> str:
    """The scheme `nested` with the scales to choose from as they are, and without the largest."""
    head = ["a scale is one of", "E5M8", "E5M5", "E5M4", "E5M3"]
    files = {"`2^E` and the four below it": "wikitext-test.json", "**`2^E` × 1.25 too**": "wikitext-test-six.json"}
    rows: Rows = []
    for label, file in files.items():
        lines = json.loads((ROOT / "format" / file).read_text(encoding="utf-8"))["tables"]["schemes"]["nested"]
        rows.append((label, [f"{lines[width]:.2f}" for width in head[1:]]))
    return markdown(head, rows)


def ingredients() -> str:
    """Percent above averaged `fp16` at E5M8 and E5M5, above the better of it and a run for the width at E5M4 and E5M3;
    means over the seeds and, where they are several, the standard errors of these means."""
    rows: Rows = []
    for setting in ("far", "near", "wiki"):
        runs = read_runs(ROOT / "ingredients" / "runs" / setting)
        for name, label in INGREDIENTS.items():
            if name not in runs:
                continue
            cells = []
            for width in ("E5M8", "E5M5", "E5M4", "E5M3"):
                baselines = [runs[of] for of in ("fp16+averaged", f"fixed-{width}+averaged") if of in runs]
                best = min(baselines, key=lambda of: statistics.mean(run["perplexity"][width] for run in of))
                known = {run["seed"]: run["perplexity"][width] for run in best}
                made = [run for run in runs[name] if run["seed"] in known]
                apart = [100 * (run["perplexity"][width] / known[run["seed"]] - 1) for run in made]
                error = f" ± {statistics.stdev(apart) / len(apart) ** 0.5:.2f}" if len(apart) > 1 else ""
                cells.append(f"{statistics.mean(apart):+.2f}{error}")
            rows.append((setting, [label, *cells]))
    return markdown(["setting", "run", "E5M8", "E5M5", "E5M4", "E5M3"], rows)


def fitting() -> str:
    """One row for each kind of fit."""
    fits = read("fitting", "h200.json")["fits"]
    head = ["share of the run", "step", "pull", "E5M8", "E5M5", "E5M4", "E5M3"]
    rows: Rows = []
    for fit in sorted(fits, key=lambda fit: tuple(fit["constants"].values())):
        share, step, pull = (f"{fit['constants'][name]:g}" for name in ("fitting", "fitting_step", "fitting_pull"))
        rows.append((share, [step, pull, *(f"{fit['perplexity'][width]:.3f}" for width in head[3:])]))
    return markdown(head, rows)


def bits(name: str) -> str:
    """Bits and perplexity of every file that was made, the most bits first."""
    result = read("bits_per_weight", f"{name}.json")
    helped = {kind: entry for kind, entry in result["llama.cpp"].items() if kind.endswith(IMPORTANCE)}
    made = [(f"**{width}**", entry, "") for width, entry in result["otaro"].items()]
    for kind, entry in result["llama.cpp"].items():
        if kind not in helped:
            other = helped.get(kind + IMPORTANCE)
            made.append((kind, entry, f"{other['perplexity']:.2f}" if other else ""))
    made.sort(key=lambda row: -row[1]["bits"])
    rows = [(label, [f"{entry['bits']:.2f}", f"{entry['perplexity']:.2f}", with_it]) for label, entry, with_it in made]
    return markdown(["file", "bits per weight", "perplexity", "with an importance matrix"], rows)


def error_widths() -> str:
    """The change in percent when E5M4 decides and not E5M5; runs made for one width at that width only."""
    rows: Rows = []
    for folder, model in {"smollm2": "SmolLM2", "small-llama": "the small Llama"}.items():
        runs = read_runs(ROOT / "error_width" / "runs" / folder)
        for name in ("untuned", "fp16", "fixed-E5M4", "fixed-E5M3", "tiers"):
            (first,), (second,) = (runs[f"{name}+by-{width}"] for width in ("E5M5", "E5M4"))
            cells = [
                f"{100 * (second['perplexity'][width] / first['perplexity'][width] - 1):+.2f}"
                if name[6:] in ("", width) or not name.startswith("fixed")
                else ""
                for width in WIDTHS
            ]
            rows.append((f"{model}, `{name.replace('-', ':')}`", cells))
    return markdown(["run", *WIDTHS], rows)


def error_rules() -> str:
    """Perplexities by the errors that decide."""
    result = read("error_width", "rules.json")
    rows: Rows = []
    for state, texts in result["perplexity"].items():
        for text, rules in texts.items():
            for rule, measured in rules.items():
                if isinstance(measured, dict):
                    rows.append((f"{state}, {text}", [rule, *(f"{value:.2f}" for value in measured.values())]))
    return markdown(["SmolLM2, split", "decided by", "E5M8", "E5M5", "E5M4", "E5M3"], rows)


def cosines() -> str:
    result = read("gradient_cosine", "smollm2.json")
    names = ["full", *WIDTHS]
    rows = [
        (name, [f"{value:.3f}" for value in line]) for name, line in zip(names, result["model_cosine"], strict=True)
    ]
    return markdown(["gradient at", *names], rows)


METHODS = {"untuned": "untuned", "`fp16`": "fp16", "`fixed`, a run for each width": "fixed", "**`tiers`**": "tiers"}
UNAVERAGED = {label: name for label, name in METHODS.items() if name != "tiers"}
FITTED = {
    "`tiers` of an earlier recipe": "tiers",
    "`tiers`, fitted for a fifth of the run (one seed)": "tiers+fitting=0.2+fitting_step=0.03",
}
SEARCHED = {"`uniform`": "uniform", "`bps`": "bps", "`otaro`": "otaro"}
ALPACA = {
    "untuned": "untuned",
    "`fp16`": "fp16",
    "`fp16`, prompts learned too": "fp16+prompts",
    "`fixed`, a run for each width": "fixed",
    "`fixed`, prompts learned too": "fixed+prompts",
    "**`tiers`**": "tiers",
    "`tiers`, completions only (two seeds)": "tiers+completions",
}
AVERAGED = {
    "`fp16`, averaged": "fp16+averaged",
    "`fixed`, a run for each width": "fixed",
    "`fixed`, averaged, a run for each width": "fixed+averaged",
    "**`tiers`**": "tiers",
}
INGREDIENTS = {
    "tiers": "**`tiers`**",
    "tiers+fitting=0.2+fitting_step=0.015": "fitted for a fifth of the run, in steps of 0.015",
    "tiers+fitting_pull=0.0": "not drawn back",
    "tiers+last-weights": "without averaging",
}
REPEATED = {label: name for label, name in AVERAGED.items() if name != "fixed"}
IMPORTANCE = " with importance"
BITS = {
    name: model
    for name, model in {"smollm2": "SmolLM2-135M", "llama-14m": "a Llama of 14 million parameters"}.items()
    if (ROOT / "bits_per_weight" / f"{name}.json").exists()
}
SCHEMES = ("truncate", "truncated codes, half-step decode", "nearest, each width from the original")
SCALES = {
    "2^E": ("`2^E`, no sign", "–", "5"),
    "2^E, signed": ("`2^E`", "–", "6"),
    "2^E or 2^(E-1) × 1, signed, by E5M5": ("`2^E`, `2^(E-1)`", "E5M5", "6"),
    "2^E or 2^(E-1) × 1, signed, by E5M4": ("the same", "E5M4", "6"),
    "2^E or 2^(E-1) × 1, 1.5, signed, by E5M5": ("× 1, 1.5", "E5M5", "7"),
    "2^E or 2^(E-1) × 1, 1.5, signed, by E5M4": ("the same", "E5M4", "7"),
    "2^E or 2^(E-1) × 1 … 1.75, signed, by E5M5": ("**× 1, 1.25, 1.5, 1.75**", "E5M5", "8"),
    "2^E or 2^(E-1) × 1 … 1.75, signed, by E5M4": ("the same", "E5M4", "8"),
}
EMBEDDINGS = {
    "at the model's width": ("at the model's width", "4.13"),
    "never under E5M4": ("**never under E5M4**", "4.34"),
}
TABLES: dict[str, Callable[[], str]] = {
    "wikitext": lambda: perplexities("wikitext", {**UNAVERAGED, **FITTED}),
    "stories": lambda: perplexities("stories", {"untuned": "untuned", "`fp16`": "fp16", **AVERAGED, **SEARCHED}),
    "ingredients": ingredients,
    "fitting": fitting,
    **{f"bits-{name}": partial(bits, name) for name in BITS},
    "epochs-four": lambda: perplexities("epochs", REPEATED, part="four"),
    "epochs-ten": lambda: perplexities(
        "epochs", {**REPEATED, "`tiers`, everything learned": "tiers+held_back=0"}, part="ten"
    ),
    "mixture": lambda: perplexities("mixture", {**METHODS, "`uniform`": "uniform", "`bps`": "bps"}),
    "paper-methods": lambda: perplexities(
        "paper_methods",
        {
            **{"untuned": "untuned", "`fp16`": "fp16", **SEARCHED},
            "`otaro`, mean of held gradients": "otaro+mean",
            "recipe `paper` (one seed)": "paper",
        },
    ),
    "paper-constants": lambda: perplexities(
        "paper_methods",
        {
            **{f"`bps`, λ = {value}": f"bps+exploration-{value}" for value in (3, 4)},
            "`bps`, λ = 5": "bps",
            **{f"`bps`, λ = {value}": f"bps+exploration-{value}" for value in (6, 7)},
            **{"`otaro`, N = 5": "otaro+delay-5", "`otaro`, N = 10": "otaro", "`otaro`, N = 20": "otaro+delay-20"},
        },
    ),
    "alpaca-accuracy": accuracies,
    "alpaca-perplexity": completions,
    "gradient-cosine": cosines,
    "error-rules": error_rules,
    "error-width": error_widths,
    "format-schemes": lambda: formats(
        "wikitext-test.json",
        "schemes",
        {name: (name,) for name in (*SCHEMES, "nearest, sliced from E5M8")}
        | {"nested": ("**nested**, of five scales",)},
        ["scheme"],
    ),
    "format-candidates": candidates,
    "format-scales": lambda: formats(
        "wikitext-test.json", "scale of nested", SCALES, ["scale", "decided by", "bits a group"]
    ),
    "format-embeddings": lambda: formats(
        "wikitext-valid.json", "embeddings and head", EMBEDDINGS, ["embeddings and head", "bits per weight at E5M3"]
    ),
}


def written(document: str) -> str:
    """A document with its tables as the results have them."""

    def table(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise SystemExit(f"there is no table {found[2]!r}, but {', '.join(TABLES)}")
        return found[1] + TABLES[found[2]]() + found[3]

    return PLACE.sub(table, document)


def differing() -> list[Path]:
    """The documents whose tables are not those of the results."""
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    return [path for path, text in texts.items() if written(text) != text]


def draw(folder: Path) -> None:
    """Perplexity at every width, a line for each run of three seeds or one, E5M4 and E5M3 on a scale of their own."""
    from matplotlib.figure import Figure

    lines = {
        name: {width: statistics.mean(run["perplexity"][width] for run in runs) for width in WIDTHS}
        for name, runs in read_runs(folder / "runs").items()
        if name not in ("untuned", "paper")
    }
    fixed = {name[6:]: lines.pop(name)[name[6:]] for name in list(lines) if re.fullmatch(r"fixed-E5M\d", name)}
    if fixed:
        lines["fixed, each run at its width"] = fixed
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    handles = {}
    for axes, panel in zip(figure.subplots(1, 2, width_ratios=(4, 3)), (WIDTHS[:4], WIDTHS[4:]), strict=True):
        for number, (name, line) in enumerate(lines.items()):
            shown = [(WIDTHS.index(width), line[width]) for width in panel if width in line]
            if shown:
                style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
                (handles[name],) = axes.plot(*zip(*shown, strict=True), marker="o", **style)
        axes.set(xlabel="precision", ylabel="perplexity")
        axes.set_xticks([WIDTHS.index(width) for width in panel], panel)
        axes.grid(alpha=0.3)
    figure.legend(handles.values(), handles.keys(), fontsize=8, loc="outside right upper")
    figure.savefig(folder / "figure.png", dpi=110)


def draw_bits() -> None:
    """Perplexity against bits per weight, a panel for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(8.0, 5.5 * len(BITS)), 4.5), layout="constrained")
    for axes, (name, model) in zip(figure.subplots(1, len(BITS), squeeze=False)[0], BITS.items(), strict=True):
        result = read("bits_per_weight", f"{name}.json")
        whole = result["llama.cpp"].pop("F16")["perplexity"]
        lines = {
            "otaro: one folder, read at six precisions": (result["otaro"], "C0", "o"),
            "llama.cpp: a file for each type": (result["llama.cpp"], "C1", "s"),
        }
        helped = {kind: result["llama.cpp"].pop(kind) for kind in [*result["llama.cpp"]] if kind.endswith(IMPORTANCE)}
        lines["the same with an importance matrix"] = (helped, "C2", "^")
        for label, (entries, color, marker) in lines.items():
            points = sorted((entry["bits"], entry["perplexity"], kind) for kind, entry in entries.items())
            axes.plot(*zip(*(point[:2] for point in points), strict=True), color=color, marker=marker, label=label)
            for x, y, kind in points:
                if not kind.endswith(IMPORTANCE):
                    place = {"xytext": (0, -12 if color == "C0" else 6), "textcoords": "offset points", "ha": "center"}
                    axes.annotate(kind, (x, y), fontsize=7, color=color, **place)
        axes.axhline(whole, color="0.5", linestyle="--", linewidth=1, label="fine-tuned, not quantised")
        axes.set(title=f"{model}, fine-tuned", xlabel="bits per weight", ylabel="perplexity")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(ROOT / "bits_per_weight" / "figure.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    parser.add_argument("--figures", action="store_true", help="draw the figures too")
    arguments = parser.parse_args()
    if arguments.figures:
        for name in ("wikitext", "stories", "mixture", "paper_methods"):
            draw(ROOT / name)
        if BITS:
            draw_bits()
    changed = differing()
    for path in changed:
        print(f"{path.relative_to(ROOT.parent)} {'differs' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(1 if changed and arguments.check else 0)


if __name__ == "__main__":
    main()
