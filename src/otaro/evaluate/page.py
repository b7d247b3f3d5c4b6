"""An evaluation as one HTML page that needs nothing else: no script, no style sheet, no picture from elsewhere."""

from __future__ import annotations

import io
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

import otaro
from otaro.console import size_text
from otaro.evaluate.documents import TASKS
from otaro.evaluate.plots import draw_each
from otaro.evaluate.report import accuracy_text, percent
from otaro.evaluate.results import Evaluation, width_name


def render(evaluation: Evaluation) -> str:
    """The page's text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "size": size_text, "accuracy": accuracy_text}
    template = environment.from_string(files(otaro.evaluate).joinpath("page.html").read_text(encoding="utf-8"))
    content: dict[str, Any] = evaluation.to_json()
    return template.render(
        **content,
        evaluation=content,
        computed=evaluation.subject.backend.description,
        about=evaluation.about,
        titles={task: TASKS[task].title for task in evaluation.tasks},
        columns=[width_name(width) for width in evaluation.subject.widths],
        plots=[(title, Markup(_svg(figure))) for title, figure in draw_each(evaluation)],
        version=otaro.__version__,
    )


def _svg(figure: Figure) -> str:
    """The drawing as an element of a page; its text is drawn, so it needs no fonts."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
