"""Plots as files, through matplotlib, which is optional."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError
from otaro.partial import write_atomically

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse a plot that could not be drawn, before hours are spent on its figures."""
    if path.suffix.lower() not in SUFFIXES:
        raise OtaroError(f"{path} cannot be drawn: name a file that ends in {', '.join(SUFFIXES)}")
    check_matplotlib()


def check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise OtaroError("plots need matplotlib: install it with pip install 'otaro-llm[plot]'")


def save_figure(figure: Any, path: Path) -> None:
    """Write a plot of matplotlib in the format that the file's name asks for."""
    write_atomically(path, lambda part: figure.savefig(part, dpi=150, format=path.suffix[1:].lower()))
