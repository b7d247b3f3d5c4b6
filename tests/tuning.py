"""What the tests of tuning share: a small data set, a run in few words, and runs for processes of their own."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from architectures import VOCABULARY, random_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import TrainerCallback

import otaro.tune.model
from otaro import cli
from otaro.tune import finishing
from otaro.tune.callbacks import UpdateCallback
from otaro.tune.command import tune
from otaro.tune.config import TuneArguments
from otaro.tune.tiers import add_tiers, without_tiers
from otaro.tune.trainer import OtaroTrainer


class Blocks(Dataset[dict[str, Tensor]]):
    """Random token blocks that a model can learn by heart."""

    def __init__(self, count: int = 12, length: int = 16) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCABULARY, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def arguments(folder: Path | str, **options: Any) -> TuneArguments:
    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 24,
        "per_device_train_batch_size": 2,
        "delay": 3,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
    }
    return TuneArguments(**{**chosen, **options})


def trainer(folder: Path | str, architecture: str = "llama", **options: Any) -> OtaroTrainer:
    data = {"train_dataset": Blocks(), **({"eval_dataset": Blocks(4)} if "eval_strategy" in options else {})}
    return OtaroTrainer(random_model(architecture), arguments(folder, **options), **data)


def command(*arguments: object) -> int:
    """``otaro tune``; errors are raised."""
    app = typer.Typer()
    app.command()(tune)
    code = typer.main.get_command(app).main([str(argument) for argument in arguments], standalone_mode=False)
    return int(code or 0)


def at_fit(number: int, act: Callable[[], None]) -> None:
    """Do something before the update of that number that fits, in a process of its own."""
    fit, calls = finishing.fit, []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            act()
        return fit(*arguments, **options)

    finishing.fit = counted


class KillAt(TrainerCallback):  # type: ignore[misc]
    """Ends the process with a signal once a step is done."""

    def __init__(self, step: int, number: int) -> None:
        self.step = step
        self.number = number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def at(when: str, act: Callable[[], None]) -> None:
    """Do something within ``otaro tune``, in a process of its own: once a step is done, before one that fits ("fit3"),
    or as its result is written."""
    if when.startswith("fit"):
        at_fit(int(when[3:]), act)
        return
    step_end, new_folder = UpdateCallback.on_step_end, otaro.tune.model.new_folder

    def on_step_end(self: UpdateCallback, args: Any, state: Any, *rest: Any, **options: Any) -> None:
        if str(state.global_step) == when:
            act()
        step_end(self, args, state, *rest, **options)

    @contextmanager
    def begun_folder(*arguments: Any) -> Iterator[Path]:
        with new_folder(*arguments) as partial:
            if when == "result":
                act()
            yield partial

    UpdateCallback.on_step_end = on_step_end  # type: ignore[method-assign]
    otaro.tune.model.new_folder = begun_folder


def killed_command(when: str, *arguments: object) -> None:
    """``otaro tune`` in a process that is killed meanwhile."""
    at(when, lambda: os.kill(os.getpid(), signal.SIGKILL))
    command(*arguments)


def command_on_a_full_disk(when: str, size: int, said: str, *arguments: object) -> None:
    """``otaro tune`` in a process that can write no longer files from some time on; `said` gets what it prints."""
    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
    at(when, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    sys.exit(cli.main(["tune", *map(str, arguments)]))


def shard(run: OtaroTrainer) -> None:
    """Have accelerate shard the weights, which it does by itself only on GPUs; for a process of its own."""
    # A property, because accelerate sets it time and again.
    AcceleratorState.distributed_type = property(lambda state: DistributedType.FSDP, lambda state, value: None)
    run.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    run.is_fsdp_enabled = True
    add_tiers(run.model, run.tiers)


def main(folder: str, options: str, kill: str, resume: str) -> None:
    """Train in a process of its own; `kill` is ``step:signal``, ``save:signal`` (amid the second one), ``fit3:signal``
    (before the third update that fits) or empty."""
    run = trainer(folder, **json.loads(options))
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        shard(run)
    when, _, name = kill.partition(":")
    if when == "save":
        save, saved = run._save_rng_state, []

        def save_or_die(output_dir: str) -> None:
            saved.append(output_dir)
            if len(saved) == 2:
                os.kill(os.getpid(), getattr(signal, name))
            save(output_dir)

        run._save_rng_state = save_or_die  # type: ignore[method-assign]
    elif when.startswith("fit"):
        at_fit(int(when[3:]), lambda: os.kill(os.getpid(), getattr(signal, name)))
    elif when:
        run.add_callback(KillAt(int(when), getattr(signal, name)))
    run.train(resume_from_checkpoint=resume == "resume" or None)
    assert run.is_fsdp_enabled == any(isinstance(weight, DTensor) for weight in run.model.parameters())
    # Of sharded weights every process gives its part.
    whole = run.accelerator.get_state_dict(run.model) if run.is_fsdp_enabled else run.model.state_dict()
    if run.is_world_process_zero():
        torch.save(without_tiers(whole), Path(folder) / "weights.pt")
        (Path(folder) / "interrupted").write_text(str(run.interrupted))
