"""What happens around an update: a width is selected before it, losses are recorded, a line is logged after it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from otaro.errors import OtaroError
from otaro.precision import Precision
from otaro.progress import Progress
from otaro.tune.config import RESUMED
from otaro.tune.held_out import Watch
from otaro.tune.resume import writing

if TYPE_CHECKING:
    from otaro.tune.trainer import OtaroTrainer

LOG_NAME = "tune.jsonl"
READ_EVERY = 10
"""Updates between two readings of losses from a device that would have to be waited for."""


def width_name(width: Precision | None) -> str:
    """A width for people and logs; no width is the full precision that the method fp16 trains in."""
    return "full" if width is None else str(width)


class UpdateCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Selects widths, records losses and keeps both in the checkpoint.

    Losses stay on the device until they are read: every `read_every` updates, and before a checkpoint. Where that is
    every update, they are read before the optimizer steps, so that one that is not finite never reaches the weights.
    """

    def __init__(self, trainer: OtaroTrainer) -> None:
        self.trainer = trainer
        needs_losses = trainer.selector.needs_losses
        self.read_every = 1 if needs_losses or trainer.args.device.type == "cpu" else READ_EVERY
        self.width: Precision | None = None
        self.loss = 0.0
        self._unread: list[tuple[int, Precision | None, Tensor]] = []
        self._lines: list[dict[str, Any]] = []
        self._learning_rate = 0.0
        self._stop = False

    def state(self) -> dict[str, Any]:
        trainer = self.trainer
        attributes = {
            "selector": trainer.selector.state_dict(),
            "held_out": asdict(trainer.watch),
            "ended": trainer.ended,
            "settings": settings(trainer),
        }
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._unread, self._lines, self._stop = [], [], False
        saved = state.stateful_callbacks[type(self).__name__]["attributes"]
        self.trainer.selector.load_state_dict(saved["selector"])
        self.trainer.watch = Watch(**saved["held_out"])
        self.trainer.ended = saved["ended"]
        if state.is_world_process_zero and not self.trainer.tuned:
            cut_log(Path(args.output_dir) / LOG_NAME, state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.width = self.trainer.selector.select()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.selector.count(self.width)
        self._unread.append((state.global_step + 1, self.width, self.trainer.update_loss))
        self._lines.append({"step": state.global_step + 1, "width": width_name(self.width)})
        if self.read_every == 1:
            self._read()
        if self.trainer.delayed is not None:
            self.trainer.delayed.width = self.width

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Read here, because the schedule moves on before the step has ended.
        assert self.trainer.optimizer is not None
        self._learning_rate = float(self.trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer.average_weights():
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
        delayed = self.trainer.delayed
        held = 0 if delayed is None else delayed.held
        self._lines[-1].update(held=held, learning_rate=self._learning_rate)
        # Several processes read together, so that all of them come to know who was asked to stop.
        asked = self.trainer.asked_to_stop and args.world_size == 1
        ends = control.should_save or control.should_training_stop or state.global_step >= state.max_steps
        if asked or ends or len(self._lines) >= self.read_every:
            if self._unread or asked:
                self._read()
            self._write(Path(args.output_dir) / LOG_NAME, state.is_world_process_zero)
        if self._stop:
            control.should_save = True
            control.should_training_stop = True
        if control.should_save and not all_finite(self.trainer.model):
            raise diverged("the weights are no longer finite", state.global_step, self.width)

    def _read(self) -> None:
        """Wait for the losses of the updates since the last time, and for whether one of the processes is to stop."""
        unread, self._unread = self._unread, []
        values = self.trainer.mean_over_processes([loss for _, _, loss in unread])
        self._stop = self.trainer.interrupted
        by_step = {line["step"]: line for line in self._lines}
        for (step, width, _), loss in zip(unread, values, strict=True):
            if not math.isfinite(loss):
                raise diverged(f"the loss became {loss}", step, width)
            self.trainer.selector.record(width, loss)
            by_step[step]["loss"] = self.loss = loss

    def _write(self, path: Path, first: bool) -> None:
        lines, self._lines = self._lines, []
        if first:
            append_to_log(path, [{name: line[name] for name in LINE} for line in lines])


LINE = ("step", "width", "loss", "held", "learning_rate")


class ProgressLine(TrainerCallback):  # type: ignore[misc]
    """Reports the current width and the latest loss of every width after each update."""

    def __init__(self, trainer: OtaroTrainer, update: UpdateCallback, progress: Progress) -> None:
        self.trainer = trainer
        self.update = update
        self.progress = progress

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        losses = self.trainer.selector.losses
        text = " ".join(f"M{width.mantissa} {losses[width]:.3f}" for width in sorted(losses, reverse=True))
        text = text or f"{self.update.loss:.3f}"
        description = f"step {state.global_step} at {width_name(self.update.width)}, loss {text}"
        self.progress(description, state.global_step, state.max_steps)


def settings(trainer: OtaroTrainer) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes from it, as JSON."""
    chosen = {name: getattr(trainer.args, name) for name in RESUMED}
    # Enumerations such as the schedule's are strings underneath; JSON gives the string back.
    plain = {name: str(value.value) if hasattr(value, "value") else value for name, value in chosen.items()}
    plain["optim"] = plain["optim"].removesuffix("_fused")  # the same optimizer, as a GPU has it
    sequences = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None
    return {**plain, "processes": trainer.args.world_size, "model": trainer.signature, "sequences": sequences}


def model_signature(model: torch.nn.Module) -> str:
    """The class of a model and how many weights it has and trains: enough to tell one model from another."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{type(model).__name__} with {total} weights, {trained} of them trained"


@torch.no_grad()
def all_finite(model: torch.nn.Module) -> bool:
    """Whether every trained weight is a number; asked before a checkpoint replaces a good one."""
    checks: dict[torch.device, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Of a sharded weight this process looks at its own shard.
            weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            checks.setdefault(weight.device, []).append(torch.isfinite(weight).all())
    return all(bool(torch.stack(found).all()) for found in checks.values())


def diverged(what: str, step: int, width: Precision | None) -> OtaroError:
    return OtaroError(
        f"{what} at step {step}, at the width {width_name(width)}: the last checkpoint is kept; "
        "lower the learning rate or look at the data of that step, then resume or start again"
    )


def cut_log(path: Path, step: int) -> None:
    """Drop what was logged after a step: a run that goes on from there logs it again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        # The last line may have been cut short when the run was killed.
        if not line.endswith("\n") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    part = path.with_name(f".{path.name}.partial")
    part.write_text("".join(kept), encoding="utf-8")
    part.replace(path)


def append_to_log(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    with writing(path, path.parent), path.open("a", encoding="utf-8") as log:
        log.writelines(json.dumps(line) + "\n" for line in lines)


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines of a log, each one update."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def losses_by_width(log: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """For each width of a log its losses with the numbers of their updates."""
    losses: dict[str, list[tuple[int, float]]] = {}
    for entry in log:
        for name, loss in entry.get("tiers", {entry.get("width"): entry.get("loss")}).items():
            losses.setdefault(name, []).append((entry["step"], loss))
    return losses
