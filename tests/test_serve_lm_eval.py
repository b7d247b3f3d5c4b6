"""lm-eval's `local-completions` through the server scores as `otaro eval` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from otaro.evaluate.backend import NativeBackend
from otaro.evaluate.tasks import evaluate_task, load_tasks
from otaro.evaluate.zero_shot import NativeScorer
from otaro.precision import Precision
from otaro.tokenizer import load_tokenizer
from tests.serving import open_tiny, serving

pytest.importorskip("tenacity", reason="lm-eval's client of servers needs it")
COUNT = 6


@pytest.mark.parametrize("width", [Precision.E5M8, Precision.E5M3], ids=str)
def test_local_completions_scores_as_eval_does(packed_llama: Path, tmp_path: Path, width: Precision) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    documents = [
        {"goal": f"Count to {number}", "sol1": f"one, {number}", "sol2": f"{number} two", "label": number % 2}
        for number in range(COUNT)
    ]
    (tmp_path / "piqa_val.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = load_tasks(["piqa"], str(tmp_path))["piqa"]

    def likelihoods(model: Any) -> tuple[list[Any], dict[str, Any]]:
        figures, samples = evaluate_task(model, task)
        responses = [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        return responses, {name: value for name, value in figures.items() if name.startswith("acc")}

    scorer = NativeScorer(NativeBackend(packed_llama, Precision.E5M8), load_tokenizer(packed_llama))
    scorer.set_width(width)
    expected, figures = likelihoods(scorer)
    with serving(open_tiny(packed_llama)) as served:
        client = LocalCompletionsAPI(
            base_url=f"{served.url}/v1/completions",
            model=f"tiny-llama@{width}",
            tokenizer=str(packed_llama),
            tokenizer_backend="huggingface",
            max_length=128,
            num_concurrent=1,
            max_retries=1,
        )
        found, served_figures = likelihoods(client)
    assert served_figures == figures
    for one, other in zip(found, expected, strict=True):
        assert [value for value, _ in one] == pytest.approx([value for value, _ in other], abs=1e-4)
        assert [greedy for _, greedy in one] == [greedy for _, greedy in other]
