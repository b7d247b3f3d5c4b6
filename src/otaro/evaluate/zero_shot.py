"""lm-eval's tasks on one loaded model at every width.

lm-eval's HFLM scores the requests, so figures are lm-eval's own. It is kept for all widths and tasks: the model inside
is switched between evaluations. lm-eval's cache of answers is never used, as it cannot tell one width from another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import lm_eval
import numpy as np
from lm_eval.models.huggingface import HFLM

import otaro
from otaro.checkpoint.folder import Progress
from otaro.evaluate.parts import Parts
from otaro.evaluate.results import Evaluation, TaskFigures, width_name
from otaro.evaluate.tasks import evaluate_task, quiet_lm_eval


class Scorer(HFLM):  # type: ignore[misc]
    """HFLM that reports how far it is and remembers tokens, which are the same at every width."""

    def __init__(self, model: Any, tokenizer: Any, batch_size: int) -> None:
        with quiet_lm_eval():
            super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self.encoded: dict[tuple[str, str], Any] = {}
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self._done = self._total = 0

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> Any:
        pair = (context, continuation)
        if pair not in self.encoded:
            self.encoded[pair] = super()._encode_pair(context, continuation)
        return self.encoded[pair]

    def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
        # HFLM runs requests that read the same tokens once.
        rows = {(*context, *continuation[:-1]) for _, context, continuation in requests}
        self._done, self._total = 0, len(rows)
        return super()._loglikelihood_tokens(requests, **options)

    def _model_call(self, inps: Any, **options: Any) -> Any:
        logits = super()._model_call(inps, **options)
        self._done += len(inps)
        self.on_progress(self._done, self._total)
        return logits


def measure_tasks(
    evaluation: Evaluation,
    tasks: dict[str, Any],
    parts: Parts,
    *,
    limit: int | None,
    batch_size: int,
    progress: Progress,
) -> None:
    """Every task at every width, into the evaluation; what `parts` hold is not measured again."""
    subject = evaluation.subject
    scorer = Scorer(subject.model, subject.tokenizer, batch_size)
    number, total = 0, len(tasks) * len(subject.widths)
    for task_name, task in tasks.items():
        scorer.encoded.clear()
        documents = _digest_documents(task)
        evaluation.tasks[task_name] = {}
        for width in subject.widths:
            key = {
                "kind": "task",
                "task": task_name,
                "precision": width_name(width),
                "limit": limit,
                "batch_size": batch_size,
                "model": subject.identity,
                "documents": documents,
                "versions": [otaro.__version__, lm_eval.__version__],
            }
            number += 1
            value = parts.get(**key)
            if value is None:
                subject.set_width(width)
                description = f"{task_name} at {width_name(width)} ({number} of {total})"
                value = _measure(scorer, task, limit, description, progress)
                parts.add(value, **key)
            evaluation.tasks[task_name][width] = TaskFigures(**value)


def _measure(scorer: Scorer, task: Any, limit: int | None, description: str, progress: Progress) -> dict[str, Any]:
    scorer.on_progress = lambda done, total: progress(description, done, total)
    found, samples = evaluate_task(scorer, task, limit)
    metrics = {
        key.removesuffix(",none"): value if isinstance(value, float) else None
        for key, value in found.items()
        if key.endswith(",none")
    }
    chosen = [
        int(np.argmax([likelihood for likelihood, _ in sample["filtered_resps"]]))
        for sample in sorted(samples, key=lambda sample: sample["doc_id"])
    ]
    return {"metrics": metrics, "chosen": chosen}


def _digest_documents(task: Any) -> str:
    return hashlib.sha256(json.dumps(task.eval_docs.to_list(), sort_keys=True).encode()).hexdigest()
