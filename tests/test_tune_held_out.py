"""Held-out text: a run over repeated data keeps the weights from before they got worse on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from test_tune_average import Weights
from torch.utils.data import ConcatDataset, Subset
from tuning import Blocks, arguments, command

from otaro.errors import OtaroError
from otaro.tune import average
from otaro.tune.held_out import Watch, hold_back
from otaro.tune.tiers import settle_model
from otaro.tune.trainer import OtaroTrainer, passes

OPTIONS: dict[str, Any] = {
    "method": "tiers",
    "optim": "adamw_torch",
    "learning_rate": 3e-3,
    "per_device_train_batch_size": 4,
    "average": 0.4,
    "max_steps": 60,
}


def trainer(folder: Path, sequences: Any, **options: Any) -> OtaroTrainer:
    return OtaroTrainer(random_model("llama"), arguments(folder, **OPTIONS, **options), train_dataset=sequences)


def test_the_last_sequences_are_held_back() -> None:
    blocks = Blocks(40)
    learned, held = hold_back(blocks, 0.1, 64)
    assert [len(learned), len(held)] == [36, 4]
    assert torch.equal(held[0]["input_ids"], blocks.ids[36])
    assert len(hold_back(blocks, 0.5, 3)[1]) == 3
    few = Blocks(9)
    assert hold_back(few, 0.1, 64) == (few, None)
    stream = iter(blocks)
    assert hold_back(stream, 0.5, 64) == (stream, None)


def test_a_data_set_stays_one() -> None:
    datasets = pytest.importorskip("datasets")
    learned, held = hold_back(datasets.Dataset.from_dict({"input_ids": [[n] for n in range(8)]}), 0.25, 64)
    assert learned["input_ids"][:] == [[n] for n in range(6)]
    assert held["input_ids"][:] == [[6], [7]]


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"max_steps": 10}, 2),
        ({"max_steps": 10, "gradient_accumulation_steps": 3}, 6),
        ({"max_steps": -1, "num_train_epochs": 4}, 4),
    ],
)
def test_how_often_data_are_seen(options: dict[str, Any], expected: float, tmp_path: Path) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=4, **options)
    assert passes(args, Blocks(20)) == expected
    assert passes(args, iter(Blocks(20))) == 0


@pytest.mark.parametrize(
    "count, options, held",
    [
        (120, {}, 15),
        (121, {}, 0),  # not seen twice
        (7, {}, 0),  # too few
        (1200, {"max_steps": 600}, 64),
        (120, {"held_back": 0.0}, 0),
        (120, {"average": 0.0}, 0),
        (120, {"method": "fp16"}, 0),
    ],
)
def test_what_is_held_back(count: int, options: dict[str, Any], held: int, tmp_path: Path) -> None:
    chosen = {**OPTIONS, "held_back": 0.125, **options}
    run = OtaroTrainer(random_model("llama"), arguments(tmp_path, **chosen), train_dataset=Blocks(count))
    assert (0 if run.held_out is None else len(run.held_out)) == held
    assert len(run.train_dataset) == count - held


def test_a_watch_keeps_the_lowest() -> None:
    watch = Watch()
    assert [watch.take(update, loss) for update, loss in enumerate([5.0, 4.0, 4.5, 3.0, float("nan"), 3.0], 1)] == [
        *(True, True, False, True, False, False)
    ]
    assert (watch.loss, watch.update, watch.worse) == (3.0, 4, 2)
    assert Watch(**json.loads(json.dumps(asdict(watch)))) == watch


def test_the_running_mean_is_as_old_as_that_over_the_last_share() -> None:
    """That over the last 0.4 of a run is 0.2 of it old."""
    ages = torch.zeros(())
    for update in range(1, 1001):
        ages = ages.lerp(torch.tensor(float(update)), 1 / average.running_weight(update, 0.4))
    assert 1000 - ages == pytest.approx(200, abs=2)


def test_what_is_learned_by_heart_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random tokens teach nothing about others: the result is the mean as it was at its best, and tiers are fitted."""
    found: dict[str, torch.Tensor] = {}

    def watch(model: torch.nn.Module) -> int:
        found.update({name: value.clone() for name, value in model.state_dict().items()})
        return settle_model(model)

    monkeypatch.setattr("otaro.tune.finishing.settle_model", watch)
    run = trainer(tmp_path, Blocks(16), held_back=0.25)
    weights = Weights(run.model)
    run.add_callback(weights)
    run.train()
    assert 0 < run.watch.update < run.watch.ended < 36
    assert run.averaged == run.watch.update
    assert run.state.global_step == run.watch.ended
    assert set(run.selector.counts.values()) == {0, 24}
    for name, value in found.items():
        if name.endswith(("_E5M3", "_E5M4")):
            continue
        mean = weights.seen[0][name]
        for update, seen in enumerate(weights.seen[: run.watch.update], 1):
            mean = mean.lerp(seen[name], 1 / average.running_weight(update, 0.4))
        torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)
    apart = [(found[name] - found[name.rpartition("_")[0]]).abs().max() for name in found if "proj.weight_" in name]
    assert all(0 < distance < 0.1 for distance in apart)


def test_a_run_that_gets_no_worse_is_one_without_those_sequences(tmp_path: Path) -> None:
    blocks = Blocks(12)
    known = ConcatDataset([blocks, Subset(blocks, range(4))])
    watched = trainer(tmp_path / "watched", known, held_back=0.25)
    plain = trainer(tmp_path / "plain", blocks)
    for run in (watched, plain):
        run.train()
    assert watched.watch.update > 50
    assert not watched.watch.ended
    for name, value in plain.model.state_dict().items():
        assert torch.equal(watched.model.state_dict()[name], value), name


def test_no_share(tmp_path: Path) -> None:
    with pytest.raises(OtaroError, match="no share to hold back"):
        arguments(tmp_path, held_back=1.0)


@pytest.mark.parametrize("options, held", [((), 3), (("--held-back", 0), 0), (("--method", "fp16"), 0)])
def test_the_command_says_so(
    options: tuple[Any, ...], held: int, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "tuned"
    characters = torch.randint(97, 123, (100 * 16,), generator=torch.Generator().manual_seed(1))
    text.write_text("".join(map(chr, characters.tolist())))
    line = ("--data", text, "--epochs", 3, "--batch-size", 4, "--sequence-length", 16, "--cpu", "--learning-rate", 0.01)
    assert command(tiny_llama, out, *line, *options) == 0
    figures = json.loads((out / "tune.json").read_text())
    said = " ".join(capsys.readouterr().err.split())
    assert figures["held_back"] == held
    assert ("holding back the last 3 sequences" in said) == bool(held)
    assert (figures["kept_update"] < figures["updates"]) == bool(held)
    assert (f"after update {figures['kept_update']}:" in said) == bool(held)
