"""The loop: transformers' Trainer with a width for every update.

The model's layers are simulated ones (see `otaro.nn`): a width set on them makes them compute with the weights that
width would have when packed. Before an update a selector says at which width it is computed (`otaro.tune.selector`);
its gradients are computed by `otaro.tune.update`, all micro-batches at once; for the method ``otaro`` the optimizer
lets ultra-low widths wait (`otaro.tune.delay`). A checkpoint has the selector in trainer_state.json, held gradients and
averaged weights in the optimizer's state.

With several processes the loss of an update is reduced over all of them before the selector sees it, so every process
selects the same width without being told.
"""

from __future__ import annotations

import shutil
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import EvalLoopOutput
from transformers.training_args import OptimizerNames
from transformers.utils import SAFE_WEIGHTS_NAME

from otaro import convert
from otaro.errors import OtaroError, foreign_code
from otaro.nn import FakeSefp, FakeSefpConv1D
from otaro.precision import Precision
from otaro.progress import Progress
from otaro.quiet import quiet
from otaro.refresh import Refresher
from otaro.tune import average, resume
from otaro.tune.callbacks import UpdateCallback, model_signature, settings
from otaro.tune.compilation import Compilation, can_compile
from otaro.tune.config import DEEPSPEED_REFUSED, TuneArguments
from otaro.tune.data import learn_prompts, lengths, make_collator
from otaro.tune.delay import DelayedOptimizer
from otaro.tune.finishing import finish
from otaro.tune.graphs import Graphs, pays
from otaro.tune.held_out import PASSES, WORSE, Watch, hold_back, mean_loss
from otaro.tune.model import has_adapters, save_settled
from otaro.tune.tiers import add_tiers, check_tiers, leave_out_tiers, reshard
from otaro.tune.update import Batch, Processes, compute_gradients

ITEMS = "num_items_in_batch"
CONFIGS = Path(__file__).parent / "accelerate"
"""What accelerate is launched with, for several GPUs."""
ARGUMENTS_NAME = "training_args.json"
# How torch's allocators say that memory ran out where they raise no error class of their own.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(text in str(error).lower() for text in OUT_OF_MEMORY)


def passes(args: TuneArguments, sequences: Any) -> float:
    """How often a run goes through its data; 0 for a stream, which has no end that is known."""
    if not hasattr(sequences, "__len__") or not len(sequences):
        return 0
    if args.max_steps <= 0:
        return args.num_train_epochs
    return args.max_steps * update_sequences(args) / len(sequences)


def update_sequences(args: TuneArguments) -> int:
    """The sequences of an update, over all processes."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size


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
        self.selector = args.make_selector()
        self.delayed: DelayedOptimizer | None = None
        self.done = False  # whether tiers are settled, with which the trainer has done what it can
        self.interrupted = False  # whether the run was asked to stop (Ctrl-C) and did so with a checkpoint
        self.asked_to_stop = False  # whether this process was
        self.unsettled = 0  # groups of weights that did not keep all bits of their tiers when these were settled
        self.update_loss: Tensor  # this process's share of the loss of the last update
        self.held_out: Any = None  # sequences that are not learned but measured on; None where there are none
        self.watch = Watch()
        self.ended = False  # whether something ended the run before its last update, such as early stopping
        self._hooked = False
        self._resumed = False
        self.batches: list[Batch] = []
        self.progress = progress
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
            weights = (layer.get_parameter(name) for layer in self._layers for name in layer.transposed)
            if not has_adapters(model) and any(not weight.requires_grad for weight in weights):
                raise OtaroError("tiers need all weights that are packed, or adapters, trained: choose another method")
            check_tiers(args.format, self.tiers)
        # Taken now: sharding changes the classes of modules.
        self.signature = model_signature(model)
        self.weights = Refresher(model, torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None)
        if args.device.type == "cuda" and args.dataloader_pin_memory:
            # Batches are on their way to the device while the update before is computed.
            args.accelerator_config = replace(args.accelerator_config, non_blocking=True)
        tokenizer = options.get("processing_class")
        if tokenizer is not None and options.get("data_collator") is None:
            # The Trainer's own would ask for a padding token and leave labels as long as they are.
            options["data_collator"] = make_collator(tokenizer)
        if self.tiers and args.average and passes(args, options.get("train_dataset")) >= PASSES:
            options["train_dataset"], self.held_out = hold_back(
                options["train_dataset"], args.held_back, args.constants.held_back_most
            )
        for name in args.report_to:
            with foreign_code(f"the run cannot report to {name}"):  # whose package may not be there
                get_reporting_integration_callbacks([name])[0]()
        super().__init__(model=model, args=args, **options)
        if self.is_deepspeed_enabled:
            raise OtaroError(DEEPSPEED_REFUSED)
        sizes = lengths(self.train_dataset)
        tokens = sum(sizes) / len(sizes) * min(update_sequences(args), len(sizes)) if sizes else None
        if args.learning_rate is None:
            args.learning_rate = self._learning_rate(model, tokens)
        if args.optim == OptimizerNames.ADAMW_TORCH and args.device.type == "cuda":
            args.optim = OptimizerNames.ADAMW_TORCH_FUSED  # in few launches, and with nothing to wait for
        compiles = args.device.type == "cuda" if args.compile is None else args.compile
        self.compilation = Compilation(
            model,
            enabled=compiles and can_compile(model) and not self.is_fsdp_enabled,
            same_length=len(set(sizes)) == 1,
            backend=args.compile_backend,
        )
        # Of sequences of other lengths each would be captured anew; what is scaled in float16 is checked on the host.
        alone = args.device.type == "cuda" and args.world_size == 1 and not args.fp16
        repeats = self.compilation.enabled and len(set(sizes)) == 1 and not args.gradient_checkpointing
        self.graphs = Graphs(
            model, enabled=alone and repeats and pays(model, sizes[0] * args.per_device_train_batch_size)
        )
        if args.idle_gpus:
            count = args.idle_gpus + args.n_gpu
            launch = f"accelerate launch --config_file {CONFIGS / 'ddp.yaml'} --num_processes {count}"
            warnings.warn(
                f"otaro: one of {count} GPUs is used; start the run by {launch} -m otaro tune … to use all",
                stacklevel=2,
            )
        if self.tiers and self.is_fsdp_enabled:
            if any(isinstance(layer, FakeSefpConv1D) for layer in self._layers):
                raise OtaroError("FSDP cuts through the groups of layers stored transposed: take DDP or the method bps")
            add_tiers(model, self.tiers)  # now, so that they are sharded as their weights are
        self.update_callback = UpdateCallback(self)
        self.add_callback(self.update_callback)
        if progress is not None:
            self.remove_callback(PrinterCallback)
            self.remove_callback(ProgressCallback)

    def _learning_rate(self, model: nn.Module, tokens: float | None) -> float:
        config = getattr(model, "config", None)
        if config is None:
            raise OtaroError(f"{type(model).__name__} has no config that says how wide it is: give a learning rate")
        hidden_size = None if has_adapters(model) else config.get_text_config().hidden_size
        return self.args.constants.learning_rate_for(hidden_size, tokens)

    @contextmanager
    def at_width(self, width: Precision | None, *, exact: bool = False) -> Iterator[None]:
        """Compute at a width; `exact`: with values in the weights' own type, not in the type that is trained in."""
        before, weights = self.weights.width, self.weights
        if exact:
            self.weights = weights.in_own_type()
        self.weights.set_width(width)
        try:
            yield
        finally:
            self.weights = weights
            self.weights.set_width(before)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        created = self.optimizer is None
        # Some are of packages of their own.
        with foreign_code(f"the optimizer {OptimizerNames(self.args.optim).value} cannot be had"):
            optimizer = super().create_optimizer(model)
        if not self._hooked:
            self._hooked = True
            if self.args.average:
                watched = () if self.held_out is None else (average.RUNNING, average.BEST)
                average.reserve(optimizer, (average.AVERAGE, *watched))
            leave_out_tiers(optimizer, self.model if model is None else model)
        if self.args.method == "otaro":
            if created:
                args = self.args
                # In float16 unscaled gradients are too small to be held in it.
                dtype = torch.bfloat16 if args.bf16 else None
                optimizer = DelayedOptimizer(optimizer, args.ultra_low_widths, args.delay, args.delay_apply, dtype)
                self.optimizer = self.delayed = optimizer
            elif self.delayed is None:
                raise OtaroError("the method otaro wraps the optimizer itself: set `optim`, do not pass `optimizers`")
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        created = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        constants, updates = self.args.constants, num_training_steps
        if created and average.averaged_updates(updates, updates, self.args.average, constants.averaged_updates):
            average.limit_decay(scheduler, self.args.get_warmup_steps(updates), constants.averaged_rate)
        return scheduler

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], *args: Any, **options: Any) -> Any:
        """The Trainer's: all micro-batches of an update, prompts with labels if they are to be learned."""
        if not self.args.completion_only:
            epoch_iterator = map(learn_prompts, epoch_iterator)
        batches, items = super().get_batch_samples(epoch_iterator, *args, **options)
        self.batches = batches
        return batches, items

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Compute the update when the Trainer has come to its last micro-batch; returns its loss."""
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        self.batches = [self._prepare_inputs(batch) for batch in self.batches]
        if not model.training:
            model.train()
        train = getattr(self.optimizer, "train", None)
        if callable(train):
            train()  # those without a schedule have another state for evaluation
        width = self.update_callback.width
        with self.compiled(width is None):
            self.update_loss = compute_gradients(
                model,
                # With the batch, because what is captured must be given all that changes.
                [{**batch, ITEMS: num_items_in_batch} for batch in self.batches],
                width,
                self.weights,
                loss=self._loss,
                backward=self.accelerator.backward,
                context=self.compute_loss_context_manager,
                processes=self.processes(),
                graphs=self.graphs if self.full_batches else None,
            )
        return self.update_loss

    @property
    def full_batches(self) -> bool:
        """Whether the update's micro-batches have the size that passes are compiled and captured for."""
        return all(len(batch["labels"]) == self._train_batch_size for batch in self.batches)

    def compiled(self, kind: object) -> AbstractContextManager[Any]:
        """What passes over the update's batches run in, by their kind."""
        sizes = {tuple(batch["labels"].shape) for batch in self.batches}
        if self.compilation.is_new((kind, *sorted(sizes))):
            self.report("compiling … (the first updates take longer)")
        return nullcontext() if self.full_batches else self.compilation.left_out()

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        count = batch.pop(ITEMS)
        with self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(model, batch, num_items_in_batch=count)
        if self.compute_loss_func is None and (count is None or not self.model_accepts_loss_kwargs):
            loss = loss / self.current_gradient_accumulation_steps  # a mean over the micro-batch
        return loss

    def processes(self) -> Processes:
        accelerator = self.accelerator
        return Processes(
            accelerator.num_processes,
            partial(accelerator.reduce, reduction="sum"),
            accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False),
        )

    def report(self, description: str, of_all: tuple[int, int] | None = None) -> None:
        """Tell whoever watches what goes on, by default after how many of the run's updates."""
        if self.progress is not None:
            self.progress(description, *(of_all or (self.state.global_step, self.state.max_steps)))

    def mean_over_processes(self, losses: Sequence[Tensor]) -> list[float]:
        """What losses are over all processes, which is waited for; also sets `interrupted`."""
        device = self.args.device
        asked = torch.full((1,), float(self.asked_to_stop), device=device)
        *values, stop = self.accelerator.reduce(torch.cat([*(loss[None] for loss in losses), asked]), "mean").tolist()
        self.interrupted = stop > 0
        return values

    def average_weights(self) -> bool:
        """Take the weights in after an update, if it is one of those to be averaged; whether there is no more to
        learn."""
        optimizer = self.optimizer
        assert optimizer is not None
        most = self.args.constants.averaged_updates
        number = average.average_index(self.state.global_step, self.state.max_steps, self.args.average, most)
        if number:
            average.add_weights(optimizer, number)
        if self.held_out is not None:
            self._measure_held_out(optimizer)
        return self.watch.ended > 0

    def _measure_held_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the weights into the mean that goes with the run; if it is time, see whether it still gets better."""
        done, updates = self.state.global_step, self.state.max_steps
        average.add_weights(optimizer, average.running_weight(done, self.args.average), average.RUNNING)
        if (updates - done) % max(1, round(updates / self.args.constants.measurements)):
            return
        with average.in_place(optimizer, average.RUNNING), self.compilation.left_out():
            loss = mean_loss(
                self.model_wrapped, self._held_out_batches(), self.weights, self.compute_loss_context_manager
            )
        if self.watch.take(done, float(self.accelerator.reduce(loss, "mean"))):
            average.copy_mean(optimizer, average.RUNNING, average.BEST)
        elif self.watch.worse >= WORSE:
            average.copy_mean(optimizer, average.BEST, average.AVERAGE)
            self.watch.ended = done

    def _held_out_batches(self) -> Iterator[Batch]:
        collate = self._get_collator_with_removed_columns(self.data_collator, "held-out")
        for start in range(0, len(self.held_out), self._train_batch_size):
            rows = range(start, min(start + self._train_batch_size, len(self.held_out)))
            batch = collate([self.held_out[row] for row in rows])
            yield self._prepare_inputs(batch if self.args.completion_only else learn_prompts(batch))

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **options: Any) -> Any:
        """Train, or go on: from a checkpoint, or with True from the last complete one in `output_dir`.

        Ctrl-C ends the update under way, writes a checkpoint and returns with :attr:`interrupted` set; a second one
        stops at once. While tiers are fitted it writes these only, and nothing if `save_strategy` is "no".
        """
        if self.done:
            raise OtaroError("this trainer's run is done, and its tiers are settled: make a new one for another run")
        checkpoint, start = self._checkpoint(resume_from_checkpoint), 0
        if checkpoint is not None:
            start = resume.check_settings(checkpoint, settings(self))
            self.accelerator.wait_for_everyone()
            folder = Path(self.args.output_dir)
            if self.is_world_process_zero() and checkpoint.resolve().parent == folder.resolve():
                resume.drop_later(folder, start)
        self.interrupted = self.asked_to_stop = False
        self._resumed = checkpoint is not None
        try:
            with self._stop_on_interrupt():
                result = super().train(None if checkpoint is None else str(checkpoint), **options)
                reshard(self.model)
                if self.averaged and not self.interrupted:
                    assert self.optimizer is not None
                    average.use_average(self.optimizer)
                if self.tiers and not self.interrupted:
                    finish(self, fresh=checkpoint is None or start < self.state.global_step)
            return result
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            ways = [
                f"memory ran out in training at batches of {self.args.per_device_train_batch_size}: lower the batch "
                "size (gradient accumulation makes up for it) or the sequence length, turn on gradient checkpointing "
                "or bf16"
            ]
            if not self.args.fit_only:
                ways.append("train adapters with LoRA")
                ways += ["choose the method bps, which needs less memory for weights"] if self.tiers else []
            raise OtaroError(", or ".join(ways)) from error
        finally:
            self.graphs.forget()
            self.weights.set_width(None)

    @property
    def tuned(self) -> bool:
        """Whether all updates are done but those that fit tiers."""
        done = self.args.fit_only or self.ended or self.watch.ended > 0
        return done or self.state.global_step >= self.state.max_steps

    @property
    def averaged(self) -> int:
        """Over how many updates the weights are averaged so far."""
        if self.watch.ended:
            return self.watch.update
        most = self.args.constants.averaged_updates
        return average.averaged_updates(self.state.global_step, self.state.max_steps, self.args.average, most)

    def evaluation_loop(self, *args: Any, **options: Any) -> EvalLoopOutput:
        """Evaluate at every width: the loss is the mean over them, and each one's own is beside it."""
        prefix = options.get("metric_key_prefix", "eval")
        outputs: dict[str, EvalLoopOutput] = {}
        widths: list[Precision | None] = [*self.selector.widths] or [None]
        for width in widths:
            with self.at_width(width), self.compilation.left_out():
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
            logs = {**logs, **{f"loss_{width}": loss for width, loss in self.selector.losses.items()}}
        super().log(logs, *args, **options)

    def _checkpoint(self, asked: str | Path | bool | None) -> Path | None:
        if asked is not True:
            return Path(asked) if asked else None
        found = resume.last_complete(Path(self.args.output_dir))
        if found is None:
            raise OtaroError(f"{self.args.output_dir} holds no complete checkpoint to resume from: start a new run")
        return found

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        # Resumed from its last checkpoint, a run that is done would make one more update before it noticed.
        if self.tuned:
            if self.args.fit_only and self.args.save_strategy != "no" and not self._resumed:
                self._save_checkpoint(self.model, trial=None)  # which the tiers go on from
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **options)

    def _load_callback_state(self) -> None:
        """Other callbacks' counters, such as early stopping's patience; the selector's is read when training begins."""
        for callback in self.callback_handler.callbacks:
            saved = self.state.stateful_callbacks.get(type(callback).__name__)
            if isinstance(saved, dict) and callback is not self.update_callback:
                for name, value in saved["attributes"].items():
                    setattr(callback, name, value)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self.ended = self.control.should_training_stop and not self.interrupted
        try:
            with quiet(), resume.writing(folder, folder.parent):
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
        state = model.state_dict() if state_dict is None else state_dict
        if isinstance(model, PreTrainedModel) or has_adapters(model):
            # By default fused experts are saved as the original files have them, one by one; in a checkpoint the
            # Trainer would not find them again and go on with the weights it happens to hold.
            original = resume.CHECKPOINT.fullmatch(folder.name) is None
            model.save_pretrained(folder, state_dict=state_dict, save_original_format=original)
            save_settled(model, folder, state)
        else:
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

        def stop(*_: object) -> None:
            if self.asked_to_stop:
                raise KeyboardInterrupt
            self.asked_to_stop = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
