"""How results look in a terminal: every table whole at every width, and labels of plots within their frame."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from otaro import cli, diagnostics, figure_file
from otaro.bench import command as bench_command
from otaro.bench.measure import Figures, Row, Speed
from otaro.bench.speculation import SpeculationRow
from otaro.checkpoint import inspect
from otaro.console import ResultTable
from otaro.evaluate import report
from otaro.evaluate.documents import TASKS
from otaro.evaluate.model import Cost
from otaro.evaluate.results import Evaluation, TaskFigures, TextFigures
from otaro.precision import Precision
from otaro.tune import report as tune_report

WIDTHS = (100, 80, 60, 40)
SPEED = Speed(12345.6, 1234.56, 123.45)


def shown(renderable: Any, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def bench_tables() -> list[ResultTable]:
    rows = [
        Row(precision, 9.12, 153_390_000, 73_730_000, 12.34, SPEED, 10, 0.74, "Q8_0", SPEED) for precision in Precision
    ]
    speculation = [SpeculationRow("answers", Precision.E5M8, Precision.E5M3, 112.3, 134.5, 100, 0.81, 2.06)]
    machine = {
        "processor": "Intel(R) Xeon(R) Platinum 8592+ at 2.80GHz",
        "instruction_set": "avx512",
        "threads": 16,
        "read_bytes_per_second": 3.49e10,
    }
    figures = Figures(machine, rows, speculation)
    return [
        bench_command._table(figures),
        bench_command._comparison(rows),
        bench_command._speculation(speculation),
    ]


def evaluation_tables() -> list[ResultTable]:
    widths = [None, *Precision]
    costs = {precision: Cost(9.09, 15_322_000_000) for precision in Precision}
    subject: Any = SimpleNamespace(packed=True, widths=widths, reference=None, costs=costs)
    evaluation = Evaluation(
        subject, {}, {width: TextFigures(1234.5678, 1.0, 0.00012345, 0.9876, 1234.5) for width in widths}
    )
    metrics = {"acc": 0.4321, "acc_stderr": 0.0123, "acc_norm": 0.5432, "acc_norm_stderr": 0.0123}
    evaluation.tasks = {task: {width: TaskFigures(metrics, [0, 1]) for width in widths} for task in TASKS}
    return report.width_tables(evaluation)


def other_tables() -> list[ResultTable]:
    perplexities = {str(precision): 123.456 for precision in Precision}
    log = [{"width": str(precision), "loss": 1.234, "step": 1} for precision in Precision]
    rows = [report.Row(precision, 9.09, 153_220_000, 123.456, 123.4) for precision in Precision]
    return [
        tune_report.table(perplexities, perplexities, log),
        report.table(rows, before=dict.fromkeys(Precision, 123456.7)),
    ]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tables", [bench_tables, evaluation_tables, other_tables])
def test_tables_are_whole_at_every_width(tables: Any, width: int) -> None:
    for table in tables():
        text = shown(table, width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        words = text.split()
        for heading in table.headings:
            assert set(heading.split()) <= set(words), heading
        for row in table._rows:
            assert all(cell in text for cell in row), row


def test_tables_are_one_piece_where_there_is_room() -> None:
    for table in (*bench_tables(), *other_tables(), evaluation_tables()[0]):
        assert shown(table, 80).split().count(table.headings[0].split()[0]) == 1


def test_columns_without_room_follow_under_the_first_one_again() -> None:
    table = ResultTable("width", "one", "a longer one", "three")
    table.add_row("E5M8", "1.00", "22.0", "333")
    table.add_section()
    table.add_row("E5M3", "4.00", "[5]", "6")
    assert [line.rstrip() for line in shown(table, 13).splitlines()] == [
        "width   one",
        "───────────",
        "E5M8   1.00",
        "",
        "E5M3   4.00",
        "",
        "            a",
        "       longer",
        "width     one",
        "─────────────",
        "E5M8     22.0",
        "",
        "E5M3      [5]",
        "",
        "width  three",
        "────────────",
        "E5M8     333",
        "",
        "E5M3       6",
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_info_and_diagnostics_are_whole_at_every_width(
    packed_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    cli.show_info(inspect(packed_llama), as_json=False)
    info = capsys.readouterr().out
    assert str(packed_llama) in info.replace("\n", "").replace(" ", "")
    diagnostics.show(diagnostics.collect(), Console(highlight=False))
    backends = capsys.readouterr().out
    for printed, headings in (
        (info, ("precision", "bits", "per", "weight", "size")),
        (backends, ("op", "backend", "why")),
    ):
        assert "…" not in printed
        assert set(headings) <= set(printed.split())
        assert max(map(len, printed.splitlines())) <= width


def test_labels_of_a_bench_plot_stand_under_it_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figure_file, "save_figure", lambda figure, _: drawn.append(figure))
    rows = [
        Row(precision, bits, 1, 1, 1.0, Speed(1, 100 / bits, 1), 10, 0.5, "F16", Speed(1, 50 / bits, 1))
        for precision, bits in zip(Precision, (9.12, 8.12, 7.12, 6.12, 5.12, 4.34), strict=True)
    ]
    bench_command._plot(rows, tmp_path / "bench.png")
    (figure,) = drawn
    (axes,) = figure.axes
    figure.draw_without_rendering()
    labels = axes.get_xticklabels()
    assert [label.get_text() for label in labels] == [f"{row.precision}\n{row.bits_per_weight:.2f}" for row in rows]
    boxes = [label.get_window_extent() for label in labels]
    assert all(axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1 for box in boxes)
    assert all(box.y1 < axes.bbox.y0 for box in boxes)
    assert all(wide.x0 > narrow.x1 for wide, narrow in itertools.pairwise(boxes))
    assert len(axes.texts) == 0
