"""What the tests of tuning share: a small data set and a run in few words; as a program, a run that can be killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from architectures import VOCABULARY, random_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import TrainerCallback

from otaro.tune.config import TuneArguments
from otaro.tune.tiers import without_tiers
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
    return OtaroTrainer(random_model(architecture), arguments(folder, **options), train_dataset=Blocks())


class KillAt(TrainerCallback):  # type: ignore[misc]
    """Ends the process with a signal once a step is done."""

    def __init__(self, step: int, number: int) -> None:
        self.step = step
        self.number = number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def shard(run: OtaroTrainer) -> None:
    """Have accelerate shard the weights, which it does by itself only on GPUs; for a process of its own."""
    # A property, because accelerate sets it time and again.
    AcceleratorState.distributed_type = property(lambda state: DistributedType.FSDP, lambda state, value: None)
    run.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    run.is_fsdp_enabled = True


def main(folder: str, options: str, kill: str, resume: str) -> None:
    """Train in a process of its own; `kill` is ``step:signal``, ``save:signal`` (amid the second one) or empty."""
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
    elif when:
        run.add_callback(KillAt(int(when), getattr(signal, name)))
    run.train(resume_from_checkpoint=resume == "resume" or None)
    assert run.is_fsdp_enabled == any(isinstance(weight, DTensor) for weight in run.model.parameters())
    # Of sharded weights every process gives its part.
    whole = run.accelerator.get_state_dict(run.model) if run.is_fsdp_enabled else run.model.state_dict()
    if run.is_world_process_zero():
        torch.save(without_tiers(whole), Path(folder) / "weights.pt")
        (Path(folder) / "interrupted").write_text(str(run.interrupted))
        if run.measured is not None:
            (Path(folder) / "measured.json").write_text(json.dumps(run.measured.to_json()))


if __name__ == "__main__":
    main(*sys.argv[1:])
