"""What happens around an update: a width is selected before it, losses are recorded, a line is logged after it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from otaro.errors import OtaroError
from otaro.evaluate.results import Width, width_name
from otaro.partial import write_atomically
from otaro.precision import Precision
from otaro.tune.config import RESUMED
from otaro.tune.held_out import Watch
from otaro.tune.resume import writing
from otaro.tune.tiers import local

if TYPE_CHECKING:
    from otaro.tune.trainer import OtaroTrainer

LOG_NAME = "tune.jsonl"
READ_EVERY = 10
"""Updates between two readings of losses from a device that would have to be waited for."""


class UpdateCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Selects widths, records losses and keeps both in the checkpoint.

    Losses stay on the device until they are read: every `read_every` updates, and before a checkpoint. Where that is
    every update, they are read before the optimizer steps, so that one that is not finite never reaches the weights.
    """

    def __init__(self, trainer: OtaroTrainer) -> None:
        self.trainer = trainer
        needs_losses = trainer.selector.needs_losses
        self.read_every = 1 if needs_losses or trainer.args.device.type == "cpu" else READ_EVERY
        self.width: Width = None
        self.loss = 0.0
        self._unread: list[tuple[int, Width, Tensor]] = []
        self._lines: list[dict[str, Any]] = []
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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._unread, self._lines, self._stop = [], [], False
        saved = state.stateful_callbacks[type(self).__name__]["attributes"]
        self.trainer.selector.load_state_dict(saved["selector"])
        self.trainer.watch = Watch(**saved["held_out"])
        self.trainer.ended = saved["ended"]
        if state.is_world_process_zero and not self.trainer.tuned:
            cut_log(Path(args.output_dir) / LOG_NAME, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.width = self.trainer.selector.select()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.selector.count(self.width)
        step, optimizer = state.global_step + 1, self.trainer.optimizer
        assert optimizer is not None
        line = {"step": step, "width": width_name(self.width), "loss": None, "held": 0}
        self._lines.append({**line, "learning_rate": float(optimizer.param_groups[0]["lr"])})
        self._unread.append((step, self.width, self.trainer.update_loss))
        if self.read_every == 1:
            self._read()
        if self.trainer.delayed is not None:
            self.trainer.delayed.width = self.width

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.average_weights():
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
        if self.trainer.delayed is not None:
            self._lines[-1]["held"] = self.trainer.delayed.held
        # Several processes read together, so that all of them come to know who was asked to stop.
        asked = self.trainer.asked_to_stop and args.world_size == 1
        ends = control.should_save or control.should_training_stop or state.global_step >= state.max_steps
        if asked or ends or len(self._lines) >= self.read_every:
            if self._unread or asked:
                self._read()
            if state.is_world_process_zero:
                append_to_log(Path(args.output_dir) / LOG_NAME, self._lines)
            self._lines = []
        if self._stop:
            control.should_save = True
            control.should_training_stop = True
        if control.should_save and not all_finite(self.trainer.model):
            raise diverged("the weights are no longer finite", state.global_step, self.width)
        losses = losses_text(self.trainer.selector.losses) or f"{self.loss:.3f}"
        self.trainer.report(f"step {state.global_step} at {width_name(self.width)}, loss {losses}")

    def _read(self) -> None:
        """Wait for the losses of the updates since the last time, and for whether one of the processes is to stop."""
        unread, self._unread = self._unread, []
        lines = [line for line in self._lines if line["loss"] is None]
        for line, loss in zip(lines, read_losses(self.trainer, unread, diverged), strict=True):
            line["loss"] = self.loss = loss
        self._stop = self.trainer.interrupted


def read_losses(
    trainer: OtaroTrainer, unread: Sequence[tuple[int, Width, Tensor]], failure: Callable[[str, int, Width], OtaroError]
) -> list[float]:
    """Wait for losses of updates at widths and tell the selector; one that is not finite ends the run."""
    losses = trainer.mean_over_processes([loss for _, _, loss in unread])
    for (step, width, _), loss in zip(unread, losses, strict=True):
        if not math.isfinite(loss):
            raise failure(f"the loss became {loss}", step, width)
        trainer.selector.record(width, loss)
    return losses


def losses_text(losses: Mapping[Precision, float]) -> str:
    """The latest loss of every width, the widest first."""
    return " ".join(f"M{width.mantissa} {losses[width]:.3f}" for width in sorted(losses, reverse=True))


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
    trained = [local(weight) for weight in model.parameters() if weight.requires_grad]
    finite = [torch.isfinite(weight).all().to(trained[0].device) for weight in trained]
    return not finite or bool(torch.stack(finite).all())  # waited for once


def diverged(what: str, step: int, width: Width) -> OtaroError:
    return OtaroError(
        f"{what} at step {step}, at the width {width_name(width)}: lower the learning rate or look at the data of that "
        "step, then resume from the last checkpoint, if there is one, or start again"
    )


def cut_log(path: Path, step: int) -> None:
    """Drop what was logged after a step: a run that goes on from there logs it again."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    # The last line may have been cut short when the run was killed.
    kept = takewhile(lambda line: line.endswith("\n") and json.loads(line)["step"] <= step, lines)
    write_atomically(path, lambda part: part.write_text("".join(kept), encoding="utf-8"))


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
