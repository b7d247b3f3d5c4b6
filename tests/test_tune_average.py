"""The mean of the weights over the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from tuning import trainer

from otaro.tune import average
from otaro.tune.recipe import Recipe
from otaro.tune.trainer import OtaroTrainer

RECIPE = Recipe()

ADAM: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-3}


@pytest.mark.parametrize(
    "updates, share, expected",
    [
        (12, 0.4, [8, 9, 10, 11, 12]),
        (12, 0.0, []),
        (3, 1.0, [1, 2, 3]),
        (1, 0.4, []),
        (3, 0.4, []),
        (5, 0.4, [4, 5]),
        (157, 0.4, list(range(95, 158, 2))),
        (400, 0.4, list(range(245, 401, 5))),
        (130, 0.5, list(range(67, 131, 3))),
    ],
)
def test_which_updates_are_averaged(updates: int, share: float, expected: list[int]) -> None:
    places = {update: average.average_index(update, updates, share, 32) for update in range(1, updates + 1)}
    assert [update for update, place in places.items() if place] == expected
    assert [place for place in places.values() if place] == list(range(1, len(expected) + 1))
    assert len(expected) <= 32
    for update in range(updates + 1):
        assert average.averaged_updates(update, updates, share, 32) == sum(taken <= update for taken in expected)


class Weights(TrainerCallback):  # type: ignore[misc]
    """Keeps the weights after every update."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, *args: Any, **options: Any) -> None:
        self.seen.append({name: value.clone() for name, value in self.model.state_dict().items()})


@pytest.mark.parametrize(
    "options",
    [
        {"method": "fp16"},
        {"method": "fixed:E5M4", "optim": "sgd", "learning_rate": 0.05},
        {**ADAM, "method": "otaro"},
        {**ADAM, "method": "bps", "architecture": "llama-tied"},
        {**ADAM, "method": "uniform", "architecture": "qwen3-moe"},
    ],
)
def test_a_run_gives_the_mean_of_its_last_weights(options: dict[str, Any], tmp_path: Path) -> None:
    run = trainer(tmp_path, **{"max_steps": 10, "average": 0.4, **options})
    weights = Weights(run.model)
    run.add_callback(weights)
    run.train()
    assert run.averaged == 4
    for name, value in run.model.state_dict().items():
        taken = torch.stack([seen[name] for seen in weights.seen[-4:]])
        torch.testing.assert_close(value, taken.mean(0), rtol=1e-5, atol=1e-7)
        if options.get("architecture") != "qwen3-moe":  # where an expert may have no tokens
            assert not torch.equal(value, taken[-1])


def rates(run: OtaroTrainer, updates: int) -> list[float]:
    """The learning rates over a run."""
    optimizer = run.create_optimizer()
    scheduler = run.create_scheduler(updates)
    found = []
    for _ in range(updates + 1):
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        found.append(rate)
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant_with_warmup"])
def test_the_rate_falls_to_its_final_value(schedule: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {**ADAM, "method": "tiers", "lr_scheduler_type": schedule, "warmup_steps": 3}
    plain, held = (rates(trainer(tmp_path, **options, average=share), 12) for share in (0.0, 0.5))
    assert held[:3] == plain[:3]
    expected = [RECIPE.averaged_rate * 1e-3 + (1 - RECIPE.averaged_rate) * rate for rate in plain[3:]]
    assert held[3:] == pytest.approx(expected)
    assert held[3] == pytest.approx(1e-3)
    if schedule != "constant_with_warmup":
        assert held[-1] == pytest.approx(RECIPE.averaged_rate * 1e-3)


def test_a_run_that_ends_before_the_average_begins_keeps_its_weights(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=10, average=0.4)
    weights = Weights(run.model)

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            control.should_training_stop = state.global_step == 3

    run.add_callback(weights)
    run.add_callback(Stop())
    run.train()
    assert run.averaged == 0
    assert all(torch.equal(value, weights.seen[2][name]) for name, value in run.model.state_dict().items())


def test_a_run_too_short_for_a_mean_is_as_one_without(tmp_path: Path) -> None:
    options: dict[str, Any] = {**ADAM, "method": "tiers", "lr_scheduler_type": "cosine"}
    plain, short = (rates(trainer(tmp_path, **options, average=share), 3) for share in (0.0, 0.4))
    assert short == plain


def test_a_parameter_that_moves_late_had_its_old_value_until_then() -> None:
    used, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([used, late], lr=0.1, weight_decay=0)
    average.reserve(optimizer)
    average.add_weights(optimizer, 1)  # nothing has moved yet
    for number in (2, 3, 4):
        used.grad = torch.ones(3)
        if number == 4:
            late.grad = torch.ones(3)
        optimizer.step()
        average.add_weights(optimizer, number)
    average.use_average(optimizer)
    torch.testing.assert_close(used.detach(), torch.full((3,), (1 + 0.9 + 0.8 + 0.7) / 4))
    torch.testing.assert_close(late.detach(), torch.full((3,), (1 + 1 + 1 + 0.9) / 4))


def test_a_mean_of_held_gradients_alone(tmp_path: Path) -> None:
    """Not one update: nothing moves, and there is nothing to average."""
    run = trainer(tmp_path, method="otaro", widths="E5M4,E5M3", delay=10, max_steps=5, average=1.0)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train()
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
