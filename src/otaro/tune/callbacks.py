"""What happens around an update: the width is chosen before it, its loss recorded within it, a line logged after it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from otaro.errors import OtaroError
from otaro.precision import Precision
from otaro.progress import Progress
from otaro.tune import average
from otaro.tune.config import RESUMED
from otaro.tune.resume import how_to_go_on
from otaro.tune.tiers import Measured
from otaro.tune.writing import writing

if TYPE_CHECKING:
    from otaro.tune.trainer import OtaroTrainer

LOG_NAME = "tune.jsonl"


def width_name(width: Precision | None) -> str:
    """A width for people and logs; no width is the full precision that the method fp16 trains in."""
    return "full" if width is None else str(width)


class PathCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Drives the path and keeps it in the checkpoint.

    The width is set when an update begins, so that all its micro-batches share it, and stays through the backward pass:
    gradient checkpointing computes the forward pass a second time there. The loss is read before the optimizer steps,
    so that one that is not finite never reaches the weights.
    """

    def __init__(self, trainer: OtaroTrainer) -> None:
        self.trainer = trainer
        self.width: Precision | None = None
        self.loss = 0.0
        self.tier_losses: dict[str, float] = {}
        self._learning_rate = 0.0
        self._stop = False

    def state(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {"path": self.trainer.path.state_dict(), "settings": settings(self.trainer)}
        if self.trainer.tiers:
            measured = self.trainer.measured
            attributes["measured"] = None if measured is None else measured.to_json()
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        saved = state.stateful_callbacks[type(self).__name__]["attributes"]
        self.trainer.path.load_state_dict(saved["path"])
        if self.trainer.tiers:
            if "measured" not in saved:
                raise OtaroError("the checkpoint is from an earlier version of the method tiers: start a new run")
            if saved["measured"] is not None:
                self.trainer.set_measured(Measured.from_json(saved["measured"]))
        if state.is_world_process_zero:
            cut_log(FilePath(args.output_dir) / LOG_NAME, state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.width = self.trainer.path.choose()
        self.trainer.set_width(self.width)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        losses, self._stop = self.trainer.take_update_losses()
        self.loss = losses[self.width]
        self.tier_losses = {str(width): loss for width, loss in losses.items() if width != self.width}
        for width, loss in losses.items():
            if not math.isfinite(loss):
                raise diverged(f"the loss became {loss}", state.global_step + 1, width)
            self.trainer.path.record(width, loss)
        if self.trainer.delayed is not None:
            self.trainer.delayed.width = self.width

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Read here, because the schedule moves on before the step has ended.
        assert self.trainer.optimizer is not None
        self._learning_rate = float(self.trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        number = average.place(state.global_step, state.max_steps, self.trainer.args.average)
        if number:
            assert self.trainer.optimizer is not None
            average.add(self.trainer.optimizer, number)
        delayed = self.trainer.delayed
        if state.is_world_process_zero:
            line = {
                "step": state.global_step,
                "width": width_name(self.width),
                "loss": self.loss,
                **({"tiers": self.tier_losses} if self.tier_losses else {}),
                "held": 0 if delayed is None else delayed.held,
                "learning_rate": self._learning_rate,
            }
            path = FilePath(args.output_dir) / LOG_NAME
            with writing(path, partial(how_to_go_on, path.parent)), path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        if self._stop:
            control.should_save = True
            control.should_training_stop = True
        if control.should_save and not all_finite(self.trainer.model):
            raise diverged("the weights are no longer finite", state.global_step, self.width)


class ProgressLine(TrainerCallback):  # type: ignore[misc]
    """Reports the current width and the latest loss of every width after each update."""

    def __init__(self, trainer: OtaroTrainer, path: PathCallback, progress: Progress) -> None:
        self.trainer = trainer
        self.path = path
        self.progress = progress

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        losses = self.trainer.path.losses
        text = " ".join(f"M{width.mantissa} {losses[width]:.3f}" for width in sorted(losses, reverse=True))
        text = text or f"{self.path.loss:.3f}"
        description = f"step {state.global_step} at {width_name(self.path.width)}, loss {text}"
        self.progress(description, state.global_step, state.max_steps)


def settings(trainer: OtaroTrainer) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes from it, as JSON."""
    chosen = {name: getattr(trainer.args, name) for name in RESUMED}
    # Enumerations such as the schedule's are strings underneath; JSON gives the string back.
    plain = {name: str(value.value) if hasattr(value, "value") else value for name, value in chosen.items()}
    sequences = None if trainer.train_dataset is None else len(trainer.train_dataset)
    return {**plain, "processes": trainer.args.world_size, "model": trainer.signature, "sequences": sequences}


def model_signature(model: torch.nn.Module) -> str:
    """The class of a model and how many weights it has and trains: enough to tell one model from another."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{type(model).__name__} with {total} weights, {trained} of them trained"


@torch.no_grad()
def all_finite(model: torch.nn.Module) -> bool:
    """Whether every trained weight is a number; asked before a checkpoint replaces a good one."""
    for parameter in model.parameters():
        # Of a sharded weight this process looks at its own shard.
        weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.requires_grad and not bool(torch.isfinite(weight).all()):
            return False
    return True


def diverged(what: str, step: int, width: Precision | None) -> OtaroError:
    return OtaroError(
        f"{what} at step {step}, at the width {width_name(width)}: the last checkpoint is kept; "
        "lower the learning rate or look at the data of that step, then resume or start again"
    )


def cut_log(path: FilePath, step: int) -> None:
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


def read_log(path: FilePath) -> list[dict[str, Any]]:
    """All lines of a log, each one update."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def losses_by_width(log: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """For each width of a log its losses with the numbers of their updates; a tier's are those of its turns."""
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in log:
        for name, loss in {entry["width"]: entry["loss"], **entry.get("tiers", {})}.items():
            found.setdefault(name, []).append((entry["step"], loss))
    return found
