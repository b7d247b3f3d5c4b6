"""Experiments: their results have the form and the names that the tables are made from, and the documents agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest

from experiments import tables, tuning
from otaro.tune.recipe import RECIPES

ROOT = Path(__file__).resolve().parents[1]
RUNS = sorted((ROOT / "experiments").glob("*/runs/**/*.json"))


def test_the_tables_of_the_documents_are_those_of_the_results() -> None:
    """`python -m experiments.tables` writes them."""
    assert tables.differing() == []


def test_every_table_stands_in_a_document() -> None:
    places = [name for path in tables.DOCUMENTS for _, name, _ in tables.PLACE.findall(path.read_text("utf-8"))]
    assert set(places) == set(tables.TABLES)


def test_a_table_that_is_out_of_date_is_noticed() -> None:
    document = "<!-- table: wikitext -->\n| run |\n<!-- end of table -->\n"
    assert tables.written(document) != document
    with pytest.raises(SystemExit, match="there is no table 'other'"):
        tables.written(document.replace("wikitext", "other"))


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in (ROOT / "experiments").glob("*/README.md")))
def test_an_experiment_is_a_folder(folder: str) -> None:
    """With what was found in it, and the script."""
    names = [path.name for path in (ROOT / "experiments" / folder).iterdir()]
    assert "run.py" in names
    assert not [name for name in names if re.search(r"_\d|_earlier", name)]


@mock.patch.dict(RECIPES)  # a run with constants of its own adds a recipe
def test_runs_are_named_by_what_they_are() -> None:
    assert len(RUNS) > 100
    for path in RUNS:
        run = json.loads(path.read_text(encoding="utf-8"))
        assert tuning.file_of(path.parent, run["run"], run["seed"]) == path
        assert run["format_version"] in (1, 2)
        if run["run"].partition("+")[0] not in (tuning.UNTUNED, "fixed"):
            tuning.run_settings(run["run"])


def test_benchmarks_do_without_experiments() -> None:
    assert not [path for path in (ROOT / "bench").glob("*.py") if "experiments" in path.read_text(encoding="utf-8")]
