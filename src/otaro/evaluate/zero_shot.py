"""lm-eval's tasks on one loaded model at every width.

Requests, metrics and standard errors are lm-eval's own; its HFLM scores the requests with torch, a class of ours with
the engine. The scorer is kept for all widths and tasks: the model inside is switched between evaluations. lm-eval's
cache of answers is never used, as it cannot tell one width from another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import lm_eval
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from torch import Tensor

import otaro
from otaro.errors import OtaroError
from otaro.evaluate.backend import NativeBackend, TorchBackend
from otaro.evaluate.parts import Parts
from otaro.evaluate.perplexity import POSITIONS_PER_SLICE
from otaro.evaluate.results import Evaluation, TaskFigures, Width, width_name
from otaro.evaluate.tasks import evaluate_task, quiet_lm_eval
from otaro.model_config import context_length
from otaro.progress import Progress
from otaro.tokenizer import beginning, encode


class Scorer:
    """What scores have in common: how far they are is reported, and tokens, the same at every width, are remembered."""

    max_length: int
    """The tokens that the model reads at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._begin = beginning(tokenizer)
        self.encoded: dict[tuple[str, str], Any] = {}
        self.on_progress: Callable[[int, int], None] = lambda done, total: None

    def set_width(self, width: Width) -> None:
        raise NotImplementedError

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)  # type: ignore[misc]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """With the beginning that the model wants, but no end: a context is gone on from."""
        ids = encode(self.tokenizer, string)
        wanted = add_special_tokens is not False and ids[: len(self._begin)] != self._begin
        return self._begin + ids if wanted else ids

    def _encode_pair(self, context: str, continuation: str) -> Any:
        pair = (context, continuation)
        if pair not in self.encoded:
            self.encoded[pair] = super()._encode_pair(context, continuation)  # type: ignore[misc]
            answer = len(self.encoded[pair][1])
            if answer > self.max_length:
                raise OtaroError(
                    f"an answer of {answer} tokens does not fit the model's context of {self.max_length}: leave it out"
                )
        return self.encoded[pair]


class TorchScorer(Scorer, HFLM):  # type: ignore[misc]
    """lm-eval's own class for models of transformers."""

    def __init__(self, backend: TorchBackend, tokenizer: Any, batch_size: int) -> None:
        Scorer.__init__(self, tokenizer)
        with quiet_lm_eval():
            HFLM.__init__(self, pretrained=backend.model, tokenizer=tokenizer, batch_size=batch_size)
        self.set_width = backend.set_width  # type: ignore[method-assign]
        self._done = self._total = 0

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


class NativeScorer(Scorer, TemplateLM):  # type: ignore[misc]
    """The same requests through the engine, which goes back to where two of them part: a context is read once."""

    def __init__(self, backend: NativeBackend, tokenizer: Any) -> None:
        Scorer.__init__(self, tokenizer)
        TemplateLM.__init__(self)
        self._backend = backend
        self.max_length = context_length(backend)
        self._width: Width = None

    def set_width(self, width: Width) -> None:
        self._width = width

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
        # The last token is not read; of what is too long the beginning is left out.
        texts = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        longest = max(map(len, texts)) - 1
        answers: dict[int, tuple[float, bool]] = {}
        held: list[int] = []
        for number in sorted(range(len(texts)), key=texts.__getitem__):
            *read, _ = texts[number]
            targets = torch.tensor(requests[number][2])
            start = min(_shared(read, held), len(read) - len(targets))  # a token's logits come with running it
            answers[number] = self._score(read, start, targets, longest)
            held = read
            self.on_progress(len(answers), len(texts))
        return [answers[number] for number in range(len(texts))]

    def _score(self, tokens: list[int], start: int, targets: Tensor, longest: int) -> tuple[float, bool]:
        """The log-probability of the targets after the last tokens, and whether each is the likeliest."""
        scores, likeliest = [], []
        first = len(tokens) - len(targets)
        for begin in range(start, len(tokens), POSITIONS_PER_SLICE):
            part = tokens[begin : begin + POSITIONS_PER_SLICE]
            rows = min(len(part), max(0, begin + len(part) - first))
            logits = self._backend.run(part, begin, self._width, longest, rows)
            wanted, targets = targets[:rows], targets[rows:]
            scores.append(logits.log_softmax(-1).gather(1, wanted[:, None]).sum())
            likeliest.append(bool((logits.argmax(-1) == wanted).all()))
        return float(sum(scores)), all(likeliest)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError("none of the tasks asks for it")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError("none of the tasks asks for it")


def _shared(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


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
    scorer: TorchScorer | NativeScorer
    if isinstance(subject.backend, NativeBackend):
        scorer = NativeScorer(subject.backend, subject.tokenizer)
    else:
        assert isinstance(subject.backend, TorchBackend)
        scorer = TorchScorer(subject.backend, subject.tokenizer, batch_size)
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
                scorer.set_width(width)
                description = f"{task_name} at {width_name(width)} ({number} of {total})"
                value = _measure(scorer, task, limit, description, progress)
                parts.add(value, **key)
            evaluation.tasks[task_name][width] = TaskFigures(**value)


def _measure(
    scorer: TorchScorer | NativeScorer, task: Any, limit: int | None, description: str, progress: Progress
) -> dict[str, Any]:
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
