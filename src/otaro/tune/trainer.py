"""The loop: transformers' Trainer with a width for every update.

What this adds to the Trainer is little. The model's layers are simulated ones (see `otaro.nn`): a width set on them
before an update makes that update's batches compute with the weights that width would have when packed. The path says
which width; the loss it gave goes back to the path. For the method ``otaro`` the optimizer lets ultra-low widths wait.
All of it is in the checkpoint: the path in trainer_state.json, held gradients in the optimizer's state.

The method ``tiers`` makes two passes an update, at a wide width and at that of a tier (see `otaro.tune.tiers`).

With several processes the loss of an update is reduced over all of them before the path sees it, so every process
chooses the same width without being told.
"""

from __future__ import annotations

import math
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import SAFE_WEIGHTS_NAME

from otaro import convert
from otaro.errors import OtaroError
from otaro.nn import FakeSefp, FakeSefpConv1D
from otaro.precision import Precision
from otaro.progress import Progress
from otaro.quiet import quiet
from otaro.tune import average, resume
from otaro.tune.callbacks import PathCallback, ProgressLine, model_signature, settings
from otaro.tune.config import DEEPSPEED_REFUSED, TuneArguments, default_learning_rate
from otaro.tune.data import IGNORED, QUESTIONS, WithQuestions, make_collator, mean_length
from otaro.tune.delay import Apply, DelayedOptimizer
from otaro.tune.distillation import distilled_loss
from otaro.tune.model import has_adapters
from otaro.tune.path import TieredPath
from otaro.tune.refresh import Refresher
from otaro.tune.tiers import (
    Measured,
    Turn,
    add_tiers,
    agreement,
    average_gradients,
    has_tiers,
    set_apart_narrowest,
    settle_model,
    share_gradients,
)
from otaro.tune.writing import writing

CONFIGS = Path(__file__).parent / "accelerate"
"""What accelerate is launched with, for several GPUs."""
MEASURING_SCALE = 1024.0
"""Of the loss whose gradients are compared before tuning: those of a mean over tokens would vanish in float16."""
ARGUMENTS_NAME = "training_args.json"
# How torch's allocators say that memory ran out where they raise no error class of their own.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(text in str(error).lower() for text in OUT_OF_MEMORY)


def without_waiting(model: nn.Module) -> AbstractContextManager[None]:
    """Passes after which DDP does not wait for the gradients of all weights: each has those of one tier only.

    Not accelerate's `no_sync`, which does nothing for a single process; DDP waits there too.
    """
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


class OtaroTrainer(Trainer):  # type: ignore[misc]
    """Tunes a causal language model at many widths. Takes what `Trainer` takes; `args` are :class:`TuneArguments`.

    The model is changed in place: its layers become simulated ones, its parameters stay ordinary ones under their own
    names, so it saves and loads as before. For LoRA call :func:`otaro.convert.simulate` before PEFT wraps the model.
    Where `args` have no learning rate, those of the trainer have the one that suits the model and the batch.
    `progress` is called after each update in place of the Trainer's own progress bar.
    """

    args: TuneArguments
    optimizer: torch.optim.Optimizer | None
    data_collator: Any

    def __init__(
        self, model: nn.Module, args: TuneArguments, *, progress: Progress | None = None, **options: Any
    ) -> None:
        args = copy(args)  # what is filled in here is of this model, not of the next one these arguments are used for
        self.path = args.make_path()
        self.delayed: DelayedOptimizer | None = None
        self.interrupted = False
        """Whether the run was asked to stop (Ctrl-C) and did so with a checkpoint."""
        self.unsettled = 0
        """Groups of weights that did not keep all bits of their tiers when these were settled."""
        self._asked_to_stop = False
        self._keeps_average = False
        self._update_losses: dict[Precision | None, Tensor] = {}
        self._predictions: Tensor | None = None
        self._turn: Turn | None = None
        self.measured: Measured | None = None
        """What the method tiers has measured before its first update."""
        self._first: list[dict[str, Any]] = []
        self._batches_done = 0
        self._progress = progress
        if not any(isinstance(module, FakeSefp) for module in model.modules()):
            convert.simulate(model, args.format, args.floor)
        self._layers = [module for module in model.modules() if isinstance(module, FakeSefp)]
        if not self._layers:
            raise OtaroError(f"{type(model).__name__} has no layer that SEFP could hold: there is nothing to tune for")
        for layer in self._layers:
            if layer.format != args.format:
                raise OtaroError(
                    f"the model simulates {layer.format}, the run is set to {args.format}: make them agree"
                )
        self.tiers = args.tier_widths if args.method == "tiers" else []
        if self.tiers:
            if any(not parameter.requires_grad for parameter in model.parameters()):
                raise OtaroError("tiers need every weight to be trained: choose another method for adapters")
            add_tiers(model, self.tiers, max(self.path.widths))
        # Taken now: sharding changes the classes of modules.
        self.signature = model_signature(model)
        self._refresh = Refresher(model, torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None)
        tokenizer = options.get("processing_class")
        if tokenizer is not None and options.get("data_collator") is None:
            # The Trainer's own would ask for a padding token and leave labels as long as they are.
            options["data_collator"] = make_collator(tokenizer)
        super().__init__(model=model, args=args, **options)
        if self.is_deepspeed_enabled:
            raise OtaroError(DEEPSPEED_REFUSED)
        if args.learning_rate is None:
            args.learning_rate = self._learning_rate(model)
        if args.idle_gpus:
            count = args.idle_gpus + args.n_gpu
            launch = f"accelerate launch --config_file {CONFIGS / 'ddp.yaml'} --num_processes {count}"
            warnings.warn(
                f"otaro: one of {count} GPUs is used; start the run by {launch} -m otaro tune … to use all",
                stacklevel=2,
            )
        if self.tiers and self.is_fsdp_enabled and any(isinstance(layer, FakeSefpConv1D) for layer in self._layers):
            raise OtaroError("FSDP cuts through the groups of layers stored transposed: take DDP or the method bps")
        self.path_callback = PathCallback(self)
        self.add_callback(self.path_callback)
        if progress is not None:
            self.remove_callback(PrinterCallback)
            self.remove_callback(ProgressCallback)
            self.add_callback(ProgressLine(self, self.path_callback, progress))

    def _learning_rate(self, model: nn.Module) -> float:
        length = mean_length(self.train_dataset)
        batches = self.args.gradient_accumulation_steps * self.args.world_size
        tokens = None if length is None else length * self.args.per_device_train_batch_size * batches
        config = getattr(model, "config", None)
        if config is None:
            raise OtaroError(f"{type(model).__name__} has no config that says how wide it is: give a learning rate")
        return default_learning_rate(None if has_adapters(model) else config.get_text_config().hidden_size, tokens)

    def set_width(self, width: Precision | None, *, again: bool = False) -> None:
        """Compute at a width from now on; None is full precision. `again`: the weights have not changed since."""
        for layer in self._layers:
            layer.precision = width
        self._refresh(again=again)

    @contextmanager
    def at_width(self, width: Precision | None, *, exact: bool = False) -> Iterator[None]:
        """`exact`: with values in the weights' own type, not in the type that is trained in."""
        before, refresh = self._layers[0].precision, self._refresh
        if exact:
            self._refresh = refresh.in_own_type()
        self.set_width(width)
        try:
            yield
        finally:
            self._refresh = refresh
            self.set_width(before)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        created = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if self.tiers:
            if created:
                set_apart_narrowest(optimizer, self.model if model is None else model, self.tiers)
            elif not has_tiers(optimizer, self.model if model is None else model):
                raise OtaroError("the method tiers trains weights of its own: set `optim`, do not pass `optimizers`")
            elif self.args.average and not any(group.get(average.RESTS) for group in optimizer.param_groups):
                raise OtaroError("tiers are averaged by groups of their own: set `optim`, or `average` to 0")
        if self.args.average and (created or not self._keeps_average):
            average.keep(optimizer)
            self._keeps_average = True
        if self.args.method == "otaro":
            if created:
                apply = cast(Apply, self.args.delay_apply)
                # In float16 unscaled gradients are too small to be held in it.
                dtype = torch.bfloat16 if self.args.bf16 else None
                optimizer = DelayedOptimizer(optimizer, self.args.ultra_low_widths, self.args.delay, apply, dtype)
                self.optimizer = optimizer
            elif self.delayed is None:
                raise OtaroError("the method otaro wraps the optimizer itself: set `optim`, do not pass `optimizers`")
            if isinstance(optimizer, DelayedOptimizer):
                self.delayed = optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        created = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if created and average.taken(num_training_steps, num_training_steps, self.args.average):
            average.hold_up(scheduler, self.args.get_warmup_steps(num_training_steps))
        return scheduler

    def get_train_dataloader(self) -> Any:
        """The Trainer's, its batches with questions if they are to be learned; evaluation has them as they are."""
        collator = self.data_collator
        if self.args.questions:
            self.data_collator = WithQuestions(collator)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collator

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """The Trainer's; what was predicted teaches the tiers."""
        inputs = {name: value for name, value in inputs.items() if name != QUESTIONS}
        if not self.tiers or not model.training:
            return super().compute_loss(model, inputs, *args, **options)
        options["return_outputs"] = True
        loss, outputs = super().compute_loss(model, inputs, *args, **options)
        self._predictions = outputs.logits.detach()
        return loss

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """The Trainer's: all batches of an update; what the tier whose turn it is has to predict in them is counted."""
        batches, items = super().get_batch_samples(*args, **options)
        if self.tiers:
            number, updates = self.state.global_step, self.state.max_steps
            self._turn = Turn(self.tiers, number, updates, self._train_batch_size, self.accelerator)
            self._turn.count(batches)
            self._batches_done = 0
            self._first = batches if self.measured is None else []
        return batches, items

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The Trainer's, adding up the loss: each micro-batch returns its share of the update's."""
        if not self.tiers:
            loss = super().training_step(model, inputs, num_items_in_batch)
            self._add_loss(self._layers[0].precision, loss)
            return loss
        copies = isinstance(model, DistributedDataParallel)
        if self.measured is None:
            self.set_measured(self._measure(model, cast(TieredPath, self.path).wide))
        assert self.measured is not None
        with without_waiting(model):
            loss = super().training_step(model, inputs, num_items_in_batch)
            self._add_loss(self._layers[0].precision, loss)
            self._train_tier(model, self._prepare_inputs(inputs))
        if self.accelerator.sync_gradients:
            if copies:
                average_gradients(model)
            share_gradients(model, self.measured.shares, self._refresh)
        return loss

    def set_measured(self, measured: Measured) -> None:
        """Go by what was measured before the first update, now or before a resume."""
        self.measured = measured
        cast(TieredPath, self.path).begin(measured.losses)

    def _measure(self, model: nn.Module, wide: tuple[Precision, Precision]) -> Measured:
        """Losses and the tiers' agreement on the first update's batches, before anything is learned from them."""
        batches, self._first = self._first, []
        device = self.args.device
        tokens = [(batch["labels"][:, 1:] != IGNORED).sum().to(device) for batch in batches]
        count = max(1, int(self.accelerator.reduce(torch.stack(tokens).sum(), "sum")))
        if self._progress is not None:
            self._progress("measuring how far the widths agree", self.state.global_step, self.state.max_steps)
        model.train()
        before = self._layers[0].precision
        copies = isinstance(model, DistributedDataParallel)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)
        cosines: dict[Precision, float] = {}
        losses: dict[Precision, Tensor] = {}
        widest, narrowest = wide
        # The widest tier first: where a floor keeps the narrower one out, its passes add to the wider one's gradient.
        for width in dict.fromkeys((narrowest, widest, *reversed(self.tiers))):
            learned = width in (widest, *self.tiers)
            self.set_width(width)
            # Dropout leaves out the same at every width.
            with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
                for batch in batches:
                    inputs = self._prepare_inputs(batch)
                    with without_waiting(model), torch.set_grad_enabled(learned):
                        labels, _ = inputs.pop("labels"), inputs.pop(QUESTIONS, None)
                        with self.compute_loss_context_manager():
                            logits = model(**inputs, use_cache=False).logits
                            loss, _ = distilled_loss(logits, logits.detach(), labels, 0.0)
                        losses[width] = losses.get(width, 0.0) + loss.detach().float()
                        if learned:
                            (loss * (MEASURING_SCALE / count)).backward()
            if copies and learned:
                average_gradients(model)
            if width in self.tiers:
                cosines = {**agreement(model, partial(self.accelerator.reduce, reduction="sum")), **cosines}
        model.zero_grad()
        if isinstance(model, FSDPModule):
            # As the Trainer has it for this batch: in an update of several it is off before the last one.
            each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
            model.set_requires_gradient_sync(self.accelerator.sync_gradients or each)
        self.set_width(before)
        sums = self.accelerator.reduce(torch.stack([*losses.values()]), "sum").tolist()
        measured = Measured(cosines, {width: total / count for width, total in zip(losses, sums, strict=True)})
        for width, value in [*measured.losses.items(), *measured.agreement.items()]:
            if not math.isfinite(value):
                raise OtaroError(f"before tuning the loss or its gradient at {width} is not finite: look at the model")
        return measured

    def _train_tier(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """The tier whose turn it is goes through its part of a micro-batch and learns from the pass before."""
        teacher, self._predictions = self._predictions, None
        turn, number = self._turn, self._batches_done
        assert teacher is not None
        assert turn is not None
        self._batches_done += 1
        size = len(inputs["input_ids"])
        rows = turn.rows(number, size)
        if not rows and not self.is_fsdp_enabled:
            self._add_loss(turn.width, torch.zeros((), device=teacher.device))
            return
        # All are taken without a copy. Under FSDP processes gather each other's weights in every pass: one without a
        # share goes along and adds nothing.
        taken: Any = slice(None) if len(rows) == size else rows or [0]
        part = {
            name: value[taken] if isinstance(value, Tensor) and value.shape[:1] == (size,) else value
            for name, value in inputs.items()
        }
        labels, questions = part.pop("labels"), part.pop(QUESTIONS, None)
        if not rows:
            labels = torch.full_like(labels, IGNORED)
        distillation = self.args.distillation
        if not distillation:
            questions = None  # without predictions they are learned from the data, as answers are
        before = self._layers[0].precision
        self.set_width(turn.width, again=True)
        with self.compute_loss_context_manager():
            outputs = model(**part, use_cache=False)
            loss, cross_entropy = distilled_loss(outputs.logits, teacher[taken], labels, distillation, questions)
        # Gradients and losses are averaged over the processes, these are parts of a sum.
        scale = self.accelerator.num_processes / turn.tokens.clamp(min=1)
        self.accelerator.backward(loss * scale)
        self._add_loss(turn.width, cross_entropy * scale)
        self.set_width(before, again=True)

    def _add_loss(self, width: Precision | None, loss: Tensor) -> None:
        loss = loss.detach().float()
        self._update_losses[width] = self._update_losses[width] + loss if width in self._update_losses else loss

    def take_update_losses(self) -> tuple[dict[Precision | None, float], bool]:
        """The losses of the update over all processes, and whether one of them was asked to stop."""
        widths = list(self._update_losses)
        losses = torch.stack(list(self._update_losses.values()))
        asked = torch.full_like(losses[:1], float(self._asked_to_stop))
        self._update_losses = {}
        *values, stop = self.accelerator.reduce(torch.cat([losses, asked]), "mean").tolist()
        self.interrupted = stop > 0
        return dict(zip(widths, values, strict=True)), self.interrupted

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **options: Any) -> Any:
        """Train, or go on: from a checkpoint, or with True from the last complete one in `output_dir`.

        Ctrl-C ends the update under way, writes a checkpoint and returns with :attr:`interrupted` set; a second one
        stops at once.
        """
        checkpoint = self._checkpoint(resume_from_checkpoint)
        if checkpoint is not None:
            resume.check_settings(checkpoint, settings(self))
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                resume.drop_later(Path(self.args.output_dir), checkpoint)
        self.interrupted = self._asked_to_stop = False
        self._update_losses = {}
        try:
            with self._stop_on_interrupt():
                result = super().train(None if checkpoint is None else str(checkpoint), **options)
            if self.averaged and not self.interrupted:
                assert self.optimizer is not None
                average.use(self.optimizer)
            if self.tiers and not self.interrupted:
                self.set_width(None)
                self.unsettled = settle_model(self.model)
                if self.is_fsdp_enabled:
                    counts = torch.tensor([self.unsettled], device=self.args.device)
                    self.unsettled = int(self.accelerator.reduce(counts, "sum"))
                self.tiers = []
            return result
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise OtaroError(
                f"memory ran out in training at batches of {self.args.per_device_train_batch_size}: lower the batch "
                "size (gradient accumulation makes up for it) or the sequence length, turn on gradient checkpointing "
                "or bf16, or train adapters with LoRA"
                + (", or choose the method bps, which needs a third of the memory for weights" if self.tiers else "")
            ) from error
        finally:
            self.set_width(None)

    @property
    def averaged(self) -> int:
        """Over how many updates the weights are averaged so far."""
        return average.taken(self.state.global_step, self.state.max_steps, self.args.average)

    def evaluation_loop(self, *args: Any, **options: Any) -> EvalLoopOutput:
        """Evaluate at every width: the loss is the mean over them, and each one's own is beside it."""
        prefix = options.get("metric_key_prefix", "eval")
        outputs: dict[str, EvalLoopOutput] = {}
        widths: list[Precision | None] = [*self.path.widths] or [None]
        for width in widths:
            with self.at_width(width):
                outputs[str(width)] = super().evaluation_loop(*args, **options)
        last = next(reversed(outputs.values()))
        if len(outputs) == 1 or f"{prefix}_loss" not in last.metrics:
            return last
        losses = {f"{prefix}_loss_{name}": output.metrics[f"{prefix}_loss"] for name, output in outputs.items()}
        mean = sum(losses.values()) / len(losses)
        return last._replace(metrics={**last.metrics, **losses, f"{prefix}_loss": mean})

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """The Trainer's, with the latest loss of every width beside the loss, for TensorBoard and the others."""
        if "loss" in logs:
            logs = {**logs, **{f"loss_{width}": loss for width, loss in self.path.losses.items()}}
        super().log(logs, *args, **options)

    def _checkpoint(self, asked: str | Path | bool | None) -> Path | None:
        if asked is None or asked is False:
            return None
        if asked is not True:
            return Path(asked)
        found = resume.last_complete(Path(self.args.output_dir))
        if found is None:
            raise OtaroError(f"{self.args.output_dir} holds no complete checkpoint to resume from: start a new run")
        return found

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        # Resumed from its last checkpoint, a run that is done would make one more update before it noticed.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **options)

    def _load_callback_state(self) -> None:
        """Other callbacks' counters, such as early stopping's patience; the path's own is read when training begins."""
        for callback in self.callback_handler.callbacks:
            saved = self.state.stateful_callbacks.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and callback is not self.path_callback and isinstance(saved, dict):
                for name, value in saved["attributes"].items():
                    setattr(callback, name, value)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            with quiet(), writing(folder, partial(resume.how_to_go_on, folder.parent)):
                super()._save_checkpoint(*args, **options)
        except BaseException:
            if self.is_world_process_zero() and resume.read_state(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)  # half of one is of no use, and in the way on a full disk
            raise

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Weights, tokenizer and arguments: these as JSON, where the Trainer's own would pickle them."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = self.model
        if isinstance(model, PreTrainedModel):
            # By default fused experts are saved as the original files have them, one by one; in a checkpoint the
            # Trainer would not find them again and go on with the weights it happens to hold.
            original = resume.CHECKPOINT.fullmatch(folder.name) is None
            model.save_pretrained(folder, state_dict=state_dict, save_original_format=original)
        elif has_adapters(model):
            model.save_pretrained(folder, state_dict=state_dict)
        else:
            state = model.state_dict() if state_dict is None else state_dict
            save_file(state, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        (folder / ARGUMENTS_NAME).write_text(self.args.to_json_string() + "\n", encoding="utf-8")

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        missing = set(load_result.missing_keys) - set(getattr(self.model, "all_tied_weights_keys", {}))
        if missing or load_result.unexpected_keys:
            name = sorted([*missing, *load_result.unexpected_keys])[0]
            raise OtaroError(f"the checkpoint and the model differ in the tensor {name}: resume with the same model")

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The state that marks a checkpoint as complete is written next, by one process: all must have come so far.
        self.accelerator.wait_for_everyone()

    @contextmanager
    def _stop_on_interrupt(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        before = signal.getsignal(signal.SIGINT)

        def stop(number: int, frame: FrameType | None) -> None:
            if self._asked_to_stop:
                raise KeyboardInterrupt
            self._asked_to_stop = True

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
