"""Scores of the tasks' requests (`experiments.alpaca.requests`), and lm-eval's figures from them.

Scoring needs torch and numpy only; the figures need lm-eval, whose own metrics and aggregation make them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Rows of logits widened to float32 at a time: 4096 of a vocabulary of 49 152 are 0.8 GB.
ROWS_PER_SLICE = 4096

Arrays = Mapping[str, np.ndarray]


def batches(requests: Arrays, tokens_per_batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Batches of similar length, the longest first, padded on the right, where a causal model does not look.

    Each is input ids [rows, longest], then for every scored token: its place in the flattened output that predicts it,
    the token, and the number of its request. Requests that read the same tokens (continuations of one token after the
    same context) share a row.
    """
    tokens, offsets, continuations = requests["tokens"], requests["offsets"], requests["continuations"]
    sharing: dict[bytes, list[int]] = {}
    for index in range(len(continuations)):
        sharing.setdefault(tokens[offsets[index] : offsets[index + 1] - 1].tobytes(), []).append(index)
    rows = sorted(sharing.values(), key=lambda row: offsets[row[0]] - offsets[row[0] + 1])
    start = 0
    while start < len(rows):
        longest = int(offsets[rows[start][0] + 1] - offsets[rows[start][0]]) - 1
        chosen = rows[start : start + max(1, tokens_per_batch // longest)]
        start += len(chosen)
        ids = np.zeros((len(chosen), longest), dtype=np.int64)
        places, targets, owners = [], [], []
        for number, row in enumerate(chosen):
            for index in row:
                request = tokens[offsets[index] : offsets[index + 1]]
                ids[number, : len(request) - 1] = request[:-1]
                scored = int(continuations[index])
                end = number * longest + len(request) - 1
                places.append(np.arange(end - scored, end))
                targets.append(request[-scored:].astype(np.int64))
                owners.append(np.full(scored, index))
        yield tuple(torch.from_numpy(part) for part in (ids, *map(np.concatenate, (places, targets, owners))))  # type: ignore[misc]


@torch.inference_mode()
def score(
    model: Any,
    requests: Arrays,
    *,
    tokens_per_batch: int = 65536,
    autocast: torch.dtype | None = None,
    prepared: Sequence[tuple[Tensor, ...]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """For every request the summed log-likelihood of its continuation, and whether it is what greedy decoding gives.

    Only positions that predict a scored token go through the output head. `prepared` are the `batches`, if at hand.
    """
    device = model.device
    count = len(requests["continuations"])
    likelihoods = torch.zeros(count, dtype=torch.float64, device=device)
    misses = torch.zeros(count, dtype=torch.int64, device=device)
    places: Tensor

    def select(_: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0].flatten(0, 1)[places][None],)

    hook = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        for batch in batches(requests, tokens_per_batch) if prepared is None else prepared:
            ids, places, targets, owners = (part.to(device, non_blocking=True) for part in batch)
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                logits = model(input_ids=ids, use_cache=False).logits[0]
            for first in range(0, len(targets), ROWS_PER_SLICE):
                part = slice(first, first + ROWS_PER_SLICE)
                losses = torch.nn.functional.cross_entropy(logits[part].float(), targets[part], reduction="none")
                likelihoods.index_add_(0, owners[part], -losses.double())
                misses.index_add_(0, owners[part], (logits[part].argmax(-1) != targets[part]).long())
    finally:
        hook.remove()
    return likelihoods.float().cpu().numpy(), (misses == 0).cpu().numpy()


def metrics(tasks: Mapping[str, Any], requests: Arrays, likelihoods: np.ndarray, greedy: np.ndarray) -> dict[str, Any]:
    """lm-eval's figures of every task from the scores, and the averages over tasks.

    `tasks` are lm-eval's, as `otaro.evaluate.tasks.load_tasks` gives them, with the documents the requests came from.
    lm-eval's evaluator would build all requests again for every set of scores; what it does with scores is done here.
    """
    from lm_eval.api.metrics import stderr_for_metric

    from otaro.evaluate.results import average

    figures: dict[str, Any] = {}
    for number, name in enumerate(requests["names"].tolist()):
        task, own = tasks[name], requests["task"] == number
        answers = list(zip(likelihoods[own].tolist(), greedy[own].tolist(), strict=True))
        starts = np.flatnonzero(np.diff(requests["documents"][own], prepend=-1)).tolist()
        limit = int(requests["limit"])
        documents = list(itertools.islice(task.eval_docs, None if limit < 0 else limit))
        if len(documents) != len(starts):
            raise SystemExit(f"{name} has {len(documents)} documents, the scores are of {len(starts)}")
        values: dict[str, list[float]] = {}
        for document, first, last in zip(documents, starts, [*starts[1:], len(answers)], strict=True):
            for metric, value in task.process_results(document, answers[first:last]).items():
                values.setdefault(metric, []).append(value)
        figures[name] = {"documents": len(documents)}
        for metric, found in values.items():
            aggregate = task.aggregation()[metric]
            figures[name][metric] = aggregate(found)
            error = stderr_for_metric(aggregate, 1)
            figures[name][f"{metric}_stderr"] = error(found) if len(found) > 1 else None
    return figures | {"average": average(list(figures.values()))}
