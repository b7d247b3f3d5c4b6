"""Killed at any moment and resumed, a run ends with the weights, the path and the log of one that was never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import tuning
from tuning import trainer

from otaro.errors import OtaroError
from otaro.tune import resume
from otaro.tune.callbacks import LOG_NAME

ADAM: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler_type": "cosine"}
TIERS: dict[str, Any] = {
    "method": "tiers",
    "per_device_train_batch_size": 3,
    "widths": "E5M6,E5M4,E5M3",
    "average": 0.7,
}
HELD_BACK: dict[str, Any] = {**TIERS, "held_back": 0.34, "learning_rate": 3e-3, "max_steps": 60}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "max_steps": 22}


def outcome(folder: Path, weights: dict[str, torch.Tensor], path: dict[str, Any]) -> tuple[Any, ...]:
    return {name: value.clone() for name, value in weights.items()}, path, (folder / LOG_NAME).read_bytes()


def check_same(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert first[1:] == second[1:]
    assert first[0].keys() == second[0].keys()
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])


def whole(folder: Path, options: dict[str, Any]) -> tuple[Any, ...]:
    run = trainer(folder, **options)
    run.train()
    return outcome(folder, run.model.state_dict(), run.selector.state_dict())


def resumed(folder: Path, options: dict[str, Any]) -> tuple[Any, ...]:
    run = trainer(folder, **options)
    run.train(resume_from_checkpoint=True)
    return outcome(folder, run.model.state_dict(), run.selector.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill, checkpoint, options",
    [
        ("13:SIGKILL", 10, {**ADAM, "method": "otaro", "average": 0.7}),
        ("9:SIGKILL", 5, {"method": "uniform"}),
        ("13:SIGKILL", 10, {**ADAM, **TIERS}),
        ("fit13:SIGKILL", 22, {**ADAM, **TIERS}),
        ("fit3:SIGKILL", 22, {**ADAM, **TIERS, "architecture": "gpt2"}),  # which has dropout
        ("fit8:SIGKILL", 0, {**ADAM, **TIERS, "average": 0.0, "fit_only": True}),
        ("7:SIGKILL", 5, {**ADAM, **HELD_BACK}),  # before the held-out loss has risen
        ("fit8:SIGKILL", 9, {**ADAM, **HELD_BACK}),  # and afterwards
        ("save:SIGKILL", 5, {**ADAM, "method": "otaro", "save_total_limit": 1, "gradient_accumulation_steps": 2}),
    ],
)
def test_killed_and_resumed(kill: str, checkpoint: int, options: dict[str, Any], tmp_path: Path) -> None:
    options = {**SAVING, **options}
    assert processes.run(tuning.main, str(tmp_path / "killed"), json.dumps(options), kill, "") == -9
    found = resume.last_complete(tmp_path / "killed")
    assert found is not None
    assert found.name == f"checkpoint-{checkpoint}"
    check_same(resumed(tmp_path / "killed", options), whole(tmp_path / "whole", options))


def test_what_the_killed_runs_hold_back_is_learned_by_heart(tmp_path: Path) -> None:
    run = trainer(tmp_path, **ADAM | HELD_BACK)
    run.train()
    assert 5 < run.watch.ended < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "when, checkpoint, options", [("8:SIGINT", 9, {}), ("8:SIGINT", 9, TIERS), ("fit8:SIGINT", 22, TIERS)]
)
def test_interrupted_and_resumed(when: str, checkpoint: int, options: dict[str, Any], tmp_path: Path) -> None:
    options = {**SAVING, **ADAM, **options, "save_steps": 500}
    assert processes.run(tuning.main, str(tmp_path / "stopped"), json.dumps(options), when, "") == 0
    assert (tmp_path / "stopped" / "interrupted").read_text() == "True"
    found = resume.last_complete(tmp_path / "stopped")
    assert found is not None
    assert found.name == f"checkpoint-{checkpoint}"
    assert (tmp_path / "stopped" / "tiers.safetensors").exists() == when.startswith("fit")
    check_same(resumed(tmp_path / "stopped", options), whole(tmp_path / "whole", options))


@pytest.mark.parametrize("method", ["otaro", "tiers"])
@pytest.mark.parametrize("architecture", ["qwen3-moe", "gpt-oss", "llama-tied"])
def test_fused_experts_and_tied_weights_resume(architecture: str, method: str, tmp_path: Path) -> None:
    options = {**SAVING, **ADAM, "max_steps": 9, "architecture": architecture, "method": method}
    expected = whole(tmp_path, options)
    shutil.rmtree(tmp_path / "checkpoint-9")
    check_same(resumed(tmp_path, options), expected)


def test_a_run_that_was_done_is_not_gone_on_with(tmp_path: Path) -> None:
    """Killed between its last update and the writing of its result, a run has nothing left to do."""
    options = {**SAVING, **ADAM, "average": 0.5}
    expected = whole(tmp_path, options)
    check_same(resumed(tmp_path, options), expected)


def test_a_run_that_only_fits_writes_its_checkpoint_once(tmp_path: Path) -> None:
    """It is the only one: killed while it was written again, a resumed run would have none to go on from."""
    options = {**SAVING, **ADAM, **TIERS, "average": 0.0, "fit_only": True}
    expected = whole(tmp_path, options)
    files = {path: path.stat() for path in (tmp_path / "checkpoint-0").iterdir()}
    (tmp_path / "tiers.safetensors").unlink()
    check_same(resumed(tmp_path, options), expected)
    for path, before in files.items():
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns), path


@pytest.mark.parametrize("checkpoint", [10, 12])
def test_tiers_that_cannot_be_used(checkpoint: int, tmp_path: Path) -> None:
    """They are fitted anew."""
    options = {**SAVING, **ADAM, **TIERS, "max_steps": 12}
    expected = whole(tmp_path, options)
    if checkpoint != 12:
        shutil.rmtree(tmp_path / "checkpoint-12")
    (tmp_path / "tiers.safetensors").write_bytes(b"of another run")
    check_same(resumed(tmp_path, options), expected)


def test_tiers_of_another_run_are_deleted(tmp_path: Path) -> None:
    """Before one could be gone on from that has not written any."""
    options = {**ADAM, **TIERS, "max_steps": 12}
    whole(tmp_path, {**options, **SAVING, "max_steps": 12})
    assert (tmp_path / "tiers.safetensors").exists()
    run = trainer(tmp_path, **options)
    run.train()
    assert not (tmp_path / "tiers.safetensors").exists()


@pytest.mark.slow
def test_early_stopping_and_a_stop_while_tiers_are_fitted(tmp_path: Path) -> None:
    """What was ended is not gone on with."""
    from architectures import random_model
    from transformers import EarlyStoppingCallback
    from tuning import Blocks, arguments

    from otaro.tune.trainer import OtaroTrainer

    options = {**ADAM, **TIERS, "average": 0.0, "learning_rate": 3e-2, "max_steps": 60, "save_steps": 2}
    options |= {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}

    def make(name: str) -> Any:
        args = arguments(tmp_path / name, **options, metric_for_best_model="eval_loss", greater_is_better=False)
        data = {"train_dataset": Blocks(), "eval_dataset": Blocks(6, 12)}
        return OtaroTrainer(random_model("llama"), args, **data, callbacks=[EarlyStoppingCallback(2)])

    expected = make("whole")
    expected.train()
    assert expected.state.global_step < 60
    stopped = make("stopped")
    report = stopped.report
    stopped.report = lambda text, *rest: (
        setattr(stopped, "asked_to_stop", text.startswith("fitting, step 9,")),
        report(text, *rest),
    )
    stopped.train()
    assert stopped.interrupted
    gone_on = make("stopped")
    gone_on.train(resume_from_checkpoint=True)
    assert gone_on.state.global_step == expected.state.global_step
    for name, value in expected.model.state_dict().items():
        assert torch.equal(gone_on.model.state_dict()[name], value), name
    assert stopped.model.state_dict().keys() == expected.model.state_dict().keys()
    # The one that was stopped can go on as well.
    stopped.report = report
    stopped.train(resume_from_checkpoint=True)
    for name, value in expected.model.state_dict().items():
        assert torch.equal(stopped.model.state_dict()[name], value), name


@pytest.mark.parametrize("options, left", [({}, 10), (TIERS, 10), (TIERS, 22)])
def test_adapters_resume(options: dict[str, Any], left: int, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from architectures import random_model
    from tuning import Blocks, arguments

    from otaro.tune.model import add_adapters
    from otaro.tune.trainer import OtaroTrainer

    def run(go_on: bool) -> tuple[Any, ...]:
        args = arguments(tmp_path, **SAVING, **{**ADAM, **options, "learning_rate": 1e-2})
        torch.manual_seed(0)
        model = add_adapters(random_model("llama"), args.format, args.floor, rank=4, dropout=0.1)
        trainer_ = OtaroTrainer(model, args, train_dataset=Blocks())
        trainer_.train(resume_from_checkpoint=go_on)
        return outcome(tmp_path, trainer_.model.state_dict(), trainer_.selector.state_dict())

    expected = run(go_on=False)
    for step in (15, 20, 22):
        if step > left:
            shutil.rmtree(tmp_path / f"checkpoint-{step}", ignore_errors=True)
    check_same(run(go_on=True), expected)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer(folder, **{**SAVING, "max_steps": 11}).train()
    return folder


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "bps"}, "with method otaro, not bps"),
        ({"learning_rate": 0.5}, "with learning_rate 0.05, not 0.5"),
        ({"scheme": "nearest"}, "with scheme nested, not nearest"),
        ({"average": 0.5}, "with average 0.0, not 0.5"),
        ({"completion_only": False}, "with completion_only True, not False"),
        ({"architecture": "qwen2"}, "with model LlamaForCausalLM with .* weights"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(options: dict[str, Any], message: str, checkpoint: Path) -> None:
    run = trainer(checkpoint, **{**SAVING, "max_steps": 11, **options})
    with pytest.raises(OtaroError, match=message):
        run.train(resume_from_checkpoint=True)


def test_an_incomplete_checkpoint_is_passed_over(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(checkpoint, folder)
    latest, earlier = folder / "checkpoint-10", folder / "checkpoint-5"
    shutil.rmtree(folder / "checkpoint-11", ignore_errors=True)
    assert resume.last_complete(folder) == latest
    (latest / resume.STATE).write_text('{"global_step": 10, "st')
    assert resume.last_complete(folder) == earlier
    with pytest.raises(OtaroError, match="not a complete checkpoint"):
        resume.check_settings(latest, {})
    shutil.rmtree(earlier)
    with pytest.raises(OtaroError, match="no complete checkpoint"):
        trainer(folder, **SAVING).train(resume_from_checkpoint=True)


def test_checkpoints_beyond_the_one_resumed_from_are_dropped(checkpoint: Path, tmp_path: Path) -> None:
    """Half overwritten by a run that is killed again, an old one could pass for complete."""
    folder = tmp_path / "run"
    shutil.copytree(checkpoint, folder)
    (folder / "checkpoint-10" / "old").touch()
    trainer(folder, **{**SAVING, "max_steps": 11}).train(resume_from_checkpoint=folder / "checkpoint-5")
    assert sorted(resume.checkpoints(folder)) == [5, 10, 11]
    assert not (folder / "checkpoint-10" / "old").exists()


def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / resume.STATE).write_text('{"global_step": 3, "stateful_callbacks": {}}')
    with pytest.raises(OtaroError, match="not written by otaro tune"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
